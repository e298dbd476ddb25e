"""JSON in and out, strictly: what is not JSON is refused, and nothing that is not JSON is sent."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from paceline.errors import RequestError

MAX_DEPTH = 64
MAX_COMMAS = 1_000_000
"""Bounds the number of values in a body, and with it the time that it takes everybody else."""


def to_json(value: Any) -> bytes:
    """Compact and in ASCII, so that no client can take a line separator inside a string for the end of a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises RequestError for invalid UTF-8, text that is not JSON (NaN and Infinity are not), a value that is no object,
    a key given twice, nesting beyond ``MAX_DEPTH``, more than ``MAX_COMMAS`` values and strings that no encoding can
    carry.
    """
    if (num_commas := data.count(b",")) > MAX_COMMAS:
        raise RequestError(f"the body has {num_commas} commas: more than {MAX_COMMAS} values are too many")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    except RequestError:
        raise
    except ValueError:
        raise RequestError("the body holds an integer with too many digits") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check_depth(value)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body is not valid JSON: {name} is not a JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RequestError(f"the body gives the key {key[:60]!r} twice in one object", key[:60])
            seen.add(key)
    return result


_NESTS = (dict, list)


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _NESTS
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body holds an unpaired surrogate (\\ud800 to \\udfff), which is no character") from None
