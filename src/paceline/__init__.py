"""Paceline: an inference engine for language models. Scheduling never changes the answer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.engine.outputs import CompletionOutput, RequestOutput
    from paceline.sampling_params import EarlyStop, SamplingParams
    from paceline.structured_outputs import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "EarlyStop", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__",
]  # fmt: skip

_HOMES = {
    "LLM": "paceline.api.llm",
    "CompletionOutput": "paceline.engine.outputs",
    "RequestOutput": "paceline.engine.outputs",
    "EarlyStop": "paceline.sampling_params",
    "SamplingParams": "paceline.sampling_params",
    "StructuredOutputs": "paceline.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``paceline --help`` does not wait for the engine."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
