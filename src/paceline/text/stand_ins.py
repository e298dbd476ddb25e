"""Characters that stand in for others while a template is rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PRIVATE_USE = range(0xF0000, 0xFFFFE)


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_in(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_strings(item, change) for item in value]
    return value


def unused_characters(*values: Any) -> Iterator[str]:
    """Private-use characters that occur in none of the values' strings."""
    used = {character for text in strings_in(values) for character in set(text)}
    return (chr(code) for code in PRIVATE_USE if chr(code) not in used)
