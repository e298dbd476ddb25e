"""Short ways to write the arguments of the operations that choose tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.tensors import ChoiceControls, FloatArray, IntArray, LogitEdits

Lists = Mapping[int, Sequence[int]]


def rows(*values: Sequence[float]) -> FloatArray:
    return np.array(values, np.float32)


def controls(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] = 0,
    positions: int | Sequence[int] = 0,
) -> ChoiceControls:
    """One value stands for all rows."""

    def column(values: Any, dtype: type) -> Any:
        return np.broadcast_to(np.array(values, dtype), (num_rows,)).copy()

    return ChoiceControls(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        column(seeds, np.uint64),
        column(positions, np.int32),
    )


def take_controls(given: ChoiceControls, index: Sequence[int]) -> ChoiceControls:
    at = np.array(index)
    return ChoiceControls(
        given.temperature[at], given.top_k[at], given.top_p[at], given.min_p[at], given.seeds[at], given.positions[at]
    )


def edits(
    num_rows: int,
    width: int,
    *,
    vocab_size: int | None = None,
    allowed: Lists | None = None,
    bias: Mapping[int, Mapping[int, float]] | None = None,
    seen: Mapping[int, Mapping[int, int]] | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    banned: Lists | None = None,
) -> LogitEdits:
    """Edits from dictionaries by row; ``seen`` maps ids to their counts in the output."""
    allowed, bias, seen, banned = allowed or {}, bias or {}, seen or {}, banned or {}
    bits = np.zeros((len(allowed), -(-width // 32)), np.uint32)
    for i, ids in enumerate(allowed.values()):
        for token in ids:
            bits[i, token // 32] |= np.uint32(1 << token % 32)
    return LogitEdits(
        vocab_size=width if vocab_size is None else vocab_size,
        allowed_rows=np.array(list(allowed), np.int32),
        allowed_bits=bits,
        bias_starts=_starts(num_rows, bias),
        bias_ids=_flat(num_rows, bias),
        bias_values=np.array([bias[r][i] for r in range(num_rows) for i in bias.get(r, ())], np.float32),
        seen_starts=_starts(num_rows, seen),
        seen_ids=_flat(num_rows, seen),
        seen_counts=np.array([seen[r][i] for r in range(num_rows) for i in seen.get(r, ())], np.int32),
        repetition=np.full(num_rows, repetition, np.float32),
        frequency=np.full(num_rows, frequency, np.float32),
        presence=np.full(num_rows, presence, np.float32),
        banned_starts=_starts(num_rows, banned),
        banned_ids=_flat(num_rows, banned),
    )


def _starts(num_rows: int, lists: Mapping[int, Any]) -> IntArray:
    return np.cumsum([0] + [len(lists.get(row, ())) for row in range(num_rows)]).astype(np.int32)


def _flat(num_rows: int, lists: Mapping[int, Any]) -> IntArray:
    return np.array([i for row in range(num_rows) for i in lists.get(row, ())], np.int32)
