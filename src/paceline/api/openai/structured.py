"""Structured output under the names that clients know for it, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.structured_outputs import FORMS, StructuredOutputs

NAMES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Fields of a body that are one form each, and which."""

Spelt = Mapping[str, str]


def structured_outputs(fields: Mapping[str, Any]) -> tuple[StructuredOutputs | None, Spelt]:
    """What a body asks for, and how its caller spelt the parameters of that. Null is absent.

    ``fields`` are ``response_format``, ``structured_outputs``, ``guided_whitespace_pattern`` and those in
    :data:`NAMES`. Raises RequestError naming the field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    blanks = given.pop("guided_whitespace_pattern", None)
    options = {} if blanks is None else {"whitespace_pattern": blanks}
    found: list[tuple[str, dict[str, Any]]] = []
    if (value := given.pop("response_format", None)) is not None and (form := _response_format(value)) is not None:
        found.append(("response_format", form))
    if (value := given.pop("structured_outputs", None)) is not None:
        found.append(("structured_outputs", value))
    if given.get("guided_json_object") is False:
        del given["guided_json_object"]
    found += [(name, {NAMES[name]: value}) for name, value in given.items()]
    if not found:
        return None, {}
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise RequestError(f"{second} and {first} exclude each other", second)
    [(name, form)] = found
    if name == "structured_outputs":
        return StructuredOutputs.parse(form), {}
    names = ["structured_outputs", *(f"structured_outputs.{form}" for form in FORMS)]
    spelt = {**dict.fromkeys(names, name), "structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
    try:
        return StructuredOutputs(**form, **options), spelt
    except RequestError as error:
        raise respelt(error, spelt) from None


def respelt(error: RequestError, spelt: Spelt) -> RequestError:
    """The same error with the parameter as the caller spelt it."""
    if error.param is None or error.param not in spelt:
        return error
    name, message = spelt[error.param], str(error)
    return RequestError(name + message[len(error.param) :] if message.startswith(error.param) else message, name)


def _response_format(value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        raise RequestError("response_format must be an object with a type", "response_format")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return {"structural_tag": {name: item for name, item in value.items() if name != "type"}}
    if kind == "json_object":
        schema = value.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema":
        nested = value.get("json_schema", value)
        schema = nested.get("schema") if isinstance(nested, Mapping) else None
        if schema is None:
            raise RequestError("response_format.json_schema.schema is required", "response_format")
        return {"json": schema}
    raise RequestError(
        "response_format.type must be text, json_object, json_schema or structural_tag", "response_format"
    )
