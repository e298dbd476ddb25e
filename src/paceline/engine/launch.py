"""Starting an engine that serves: the engine itself and its front, in two processes or in one."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import EngineConfig
from paceline.engine.links import EngineProcess, EngineThread
from paceline.engine.load import (
    LoadedEngine,
    Runtime,
    describe_model,
    grammar_vocabulary,
    load_engine,
    load_runtime,
    load_text,
    open_model,
)
from paceline.engine.model_info import ModelInfo
from paceline.engine.service import AsyncEngine
from paceline.sample.grammar import Grammars


def launch_engine(config: EngineConfig, *, in_process: bool = False, progress: bool = True) -> AsyncEngine:
    """Fetch the model if needed and load it; :meth:`AsyncEngine.start` is left to the caller.

    The engine gets a process of its own, so that its death, or a step that hangs, costs its callers a pause and nothing
    else; with ``in_process`` it gets a thread. Raises CheckpointError and ConfigError.
    """
    if in_process:
        return engine_on_thread(load_engine(config, progress=progress), config)
    info, found, link = load_model_process(config, progress=progress)
    return AsyncEngine(info, found, link, EngineProcess, load_model_process)


def load_model_process(
    config: EngineConfig, *, progress: bool = False
) -> tuple[ModelInfo, EngineConfig, EngineProcess]:
    """An engine process that has loaded the model, what its front has to know, and the settings for its successors.

    Raises CheckpointError and ConfigError.
    """
    opened = open_model(config, progress=progress)
    # The engine's process need not search again for what has been found.
    found = replace(config, model=str(opened.path))
    link = EngineProcess(found)
    try:
        tokenizer, template = load_text(opened, config)
        grammars = Grammars(lambda: grammar_vocabulary(tokenizer))
        info = describe_model(config, opened, tokenizer, template, grammars, link.wait_ready())
    except BaseException:
        link.kill()
        raise
    return info, found, link


def engine_on_thread(loaded: LoadedEngine, config: EngineConfig) -> AsyncEngine:
    """A front for an engine that is in this process already. Its successors are loaded anew."""
    return AsyncEngine(
        loaded.info,
        config,
        EngineThread(lambda: Runtime(loaded.engine, loaded.facts)),
        lambda again: EngineThread(lambda: load_runtime(again)),
        _load_model_thread,
    )


def _load_model_thread(config: EngineConfig) -> tuple[ModelInfo, EngineConfig, EngineThread]:
    loaded = load_engine(config, progress=False)
    return loaded.info, config, EngineThread(lambda: Runtime(loaded.engine, loaded.facts))
