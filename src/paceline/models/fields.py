"""Typed reading of a checkpoint's metadata: what is missing, of a wrong type or absurd is named, with its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError

MAX_SIZE = 2**24
MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096
"""Nothing is larger than these: a number that is, is damage, and would only exhaust the memory."""


class Fields:
    """Key-value pairs of ``source``. ``prefix`` stands before every key; a null counts as absent.

    Each reader returns ``default`` for an absent key and raises CheckpointError if there is none, or if the value does
    not fit.
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self._source = source
        self._values = values
        self._prefix = prefix

    @property
    def names(self) -> list[str]:
        """The keys that are there, without the prefix."""
        return [key.removeprefix(self._prefix) for key in self._values if key.startswith(self._prefix)]

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, f"must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def get(self, key: str) -> Any:
        """The value as it is; None if it is absent."""
        return self._values.get(self._prefix + key)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of them; empty if absent."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
                raise self.error(key, f"must name token ids from 0 to {vocab_size - 1}, not {item!r}")
        return tuple(ids)

    def section(self, key: str) -> Fields:
        """A nested mapping; an empty one if absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {value!r}")
        return Fields(f"{self._source}: {self._prefix}{key}", value)

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {self._prefix}{key} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing")
        return default


def common_head_dim(fields: Fields, hidden_key: str, heads_key: str) -> int:
    """Width of a head where none is given: the hidden width shared among the heads."""
    hidden, heads = fields.integer(hidden_key), fields.integer(heads_key)
    if hidden % heads:
        raise fields.error(heads_key, f"must divide {hidden_key} {hidden}, but is {heads}")
    return hidden // heads


def kv_heads(fields: Fields, heads_key: str, kv_heads_key: str) -> int:
    """Number of key and value heads; as many as query heads where none is given."""
    heads = fields.integer(heads_key)
    num_kv = fields.integer(kv_heads_key, heads)
    if heads % num_kv:
        raise fields.error(kv_heads_key, f"must divide {heads_key} {heads}, but is {num_kv}")
    return num_kv
