"""The forms of structured output that a caller may ask for, checked as far as that needs no grammar library."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import RequestError

MAX_GRAMMAR_BYTES = 128 * 1024
"""A schema, pattern or grammar as text, and all choices together, at most."""
MAX_CHOICE_LIST = 1024
MAX_TAGS = 128
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text of an answer has to be. Exactly one form is given; the others are absent.

    Immutable and validated on construction: a wrong type or size raises :class:`RequestError` naming the field as
    ``structured_outputs.<field>``. Whether the library takes the grammar is checked on submission.

    Attributes:
        json: JSON that matches this schema: an object, a boolean, or either as text.
        json_object: any JSON object.
        regex: a text that the whole pattern matches (syntax of Rust's ``regex``, without look-around).
        choice: one of these texts, at most 1024.
        grammar: a text of this language, written in Lark (with a rule ``start``) or GBNF (with a rule ``root``).
        structural_tag: free text in which each trigger begins a tag: ``{"structures": [{"begin": text, "schema":
            schema, "end": text}, ...], "triggers": [text, ...]}``, as an object or as text.
        whitespace_pattern: what may stand between the tokens of JSON; None is up to 64 blanks and line breaks.
        disable_any_whitespace: nothing stands between them.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _wrong("json_object", "must be true or false")
        given = self.given
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(FORMS)}, not {found}", "structured_outputs"
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace", "must be true or false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        if self.json is not None:
            object.__setattr__(self, "json", _json_text("json", self.json, (dict, bool)))
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _json_text("structural_tag", self.structural_tag, (dict,)))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def given(self) -> list[str]:
        """Names of the forms that are given."""
        return [name for name in FORMS if (value := getattr(self, name)) is not None and value is not _absent(name)]

    @classmethod
    def parse(cls, value: object) -> StructuredOutputs:
        """From an object with these fields, in which null is absent. Raises RequestError."""
        if not isinstance(value, Mapping):
            raise RequestError("structured_outputs must be an object", "structured_outputs")
        known = {field.name for field in fields(cls)}
        if unknown := {name for name, item in value.items() if item not in (None, False)} - known:
            name = str(min(unknown, key=str))[:60]
            raise RequestError(f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
        return cls(**{name: item for name, item in value.items() if name in known and item is not None})


def _absent(name: str) -> object:
    return False if name == "json_object" else None


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"structured_outputs.{name} {what}", f"structured_outputs.{name}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "must be a string that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _wrong(name, "holds half a surrogate pair, which is no character") from None
    if size > MAX_GRAMMAR_BYTES:
        raise _wrong(name, f"may have {MAX_GRAMMAR_BYTES} bytes, not {size}")


def _json_text(name: str, value: object, kinds: tuple[type, ...]) -> str:
    """A value, or the value in a text, as compact JSON: equal values give equal texts."""
    if isinstance(value, str):
        _check_text(name, value)
    try:
        parsed = json_text.loads(value) if isinstance(value, str) else value
        plain = dict(parsed) if isinstance(parsed, Mapping) else parsed
        if not isinstance(plain, kinds):
            raise _wrong(name, f"must be {' or '.join(_KIND_NAMES[kind] for kind in kinds)}")
        text = json_text.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise _wrong(name, "is nested too deeply") from None
    except RequestError:
        raise
    except (ValueError, TypeError) as error:
        raise _wrong(name, f"is not valid JSON: {error}") from None
    _check_text(name, text)
    return text


_KIND_NAMES = {dict: "an object", bool: "a boolean"}


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise _wrong("choice", "must be a list of strings that is not empty")
    if len(value) > MAX_CHOICE_LIST:
        raise _wrong("choice", f"takes at most {MAX_CHOICE_LIST} strings, not {len(value)}")
    for item in value:
        _check_text("choice", item)
    if (size := sum(len(item.encode()) for item in value)) > MAX_GRAMMAR_BYTES:
        raise _wrong("choice", f"may have {MAX_GRAMMAR_BYTES} bytes in all, not {size}")
    return tuple(value)
