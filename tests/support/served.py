"""A front around an engine that a test has put together, on a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.links import EngineThread
from paceline.engine.load import LoadedEngine, Runtime
from paceline.engine.model_info import ModelInfo
from paceline.engine.service import AsyncEngine
from paceline.errors import CheckpointError


def served(
    loaded: LoadedEngine,
    reload: Callable[[], LoadedEngine] | None = None,
    others: Mapping[str, Callable[[], LoadedEngine]] | None = None,
    **settings: Any,
) -> AsyncEngine:
    """Not started yet. ``reload`` makes its successors when it fails; without it, it must not.

    ``others`` are the models that can take its place, by their path.
    """

    def launch(config: EngineConfig) -> EngineThread:
        make = (others or {}).get(config.model, reload)
        assert make is not None, "the engine was lost"
        return thread_of(make())

    def load(config: EngineConfig) -> tuple[ModelInfo, EngineConfig, EngineThread]:
        if config.model not in (others or {}):
            raise CheckpointError(f"{config.model}: no such file")
        other = (others or {})[config.model]()
        return replace(other.info, name=config.model), config, thread_of(other)

    def thread_of(loaded: LoadedEngine) -> EngineThread:
        return EngineThread(lambda: Runtime(loaded.engine, loaded.facts))

    config = EngineConfig("small", seed=0, max_num_seqs=loaded.engine.scheduler.limits.max_num_seqs, **settings)
    return AsyncEngine(loaded.info, config, thread_of(loaded), launch, load)
