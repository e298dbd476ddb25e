"""A model's files, opened: what every later step reads, whichever format they came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.tensors import RawTensor


class CheckpointFormat(Enum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. Tensors are views of memory maps and stay valid as long as they are referenced.

    Attributes:
        path: the folder, or the (first) GGUF file.
        metadata: the parsed ``config.json``, or the GGUF key-value pairs (arrays as lists).
        tensors: by the name they have in the file.
        generation_config: the parsed ``generation_config.json``; empty for GGUF.
    """

    path: Path
    format: CheckpointFormat
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
