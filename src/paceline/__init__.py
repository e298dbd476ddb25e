"""Paceline: an inference engine for language models. Scheduling never changes the answer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.config import EngineConfig
    from paceline.engine.launch import launch_engine
    from paceline.engine.outputs import ChoiceDelta, CompletionOutput, RequestOutput
    from paceline.engine.service import AsyncEngine
    from paceline.sampling_params import EarlyStop, SamplingParams
    from paceline.structured_outputs import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncEngine", "ChoiceDelta", "CompletionOutput", "EarlyStop", "EngineConfig", "RequestOutput",
    "SamplingParams", "StructuredOutputs", "__version__", "launch_engine",
]  # fmt: skip

_HOMES = {
    "LLM": "paceline.api.llm",
    "AsyncEngine": "paceline.engine.service",
    "ChoiceDelta": "paceline.engine.outputs",
    "CompletionOutput": "paceline.engine.outputs",
    "RequestOutput": "paceline.engine.outputs",
    "EngineConfig": "paceline.config",
    "launch_engine": "paceline.engine.launch",
    "EarlyStop": "paceline.sampling_params",
    "SamplingParams": "paceline.sampling_params",
    "StructuredOutputs": "paceline.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``paceline --help`` does not wait for the engine."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
