"""A front around an engine that a test has put together, on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.links import EngineThread
from paceline.engine.load import LoadedEngine, Runtime
from paceline.engine.service import AsyncEngine


def served(loaded: LoadedEngine, reload: Callable[[], LoadedEngine] | None = None, **settings: Any) -> AsyncEngine:
    """Not started yet. ``reload`` makes its successors when it fails; without it, it must not."""

    def launch(_: EngineConfig) -> EngineThread:
        assert reload is not None, "the engine was lost"
        again = reload()
        return EngineThread(lambda: Runtime(again.engine, again.facts))

    config = EngineConfig("small", seed=0, max_num_seqs=loaded.engine.scheduler.limits.max_num_seqs, **settings)
    return AsyncEngine(loaded.info, config, EngineThread(lambda: Runtime(loaded.engine, loaded.facts)), launch)
