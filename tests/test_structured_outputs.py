from __future__ import annotations

from typing import Any

import pytest

from paceline import StructuredOutputs
from paceline.errors import RequestError
from paceline.structured_outputs import MAX_GRAMMAR_BYTES


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json": "[]"}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json"),
        ({"json": {"const": {1, 2}}}, "structured_outputs.json"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json"),
        ({"json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "structured_outputs.json"),
        ({"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "structured_outputs.regex"),
        ({"regex": ["a"]}, "structured_outputs.regex"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"choice": "a"}, "structured_outputs.choice"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["a"] * 1025}, "structured_outputs.choice"),
        ({"choice": ["x" * MAX_GRAMMAR_BYTES, "y"]}, "structured_outputs.choice"),
        ({"structural_tag": []}, "structured_outputs.structural_tag"),
        ({"json": {}, "whitespace_pattern": 5}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(form: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(**form)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def test_equal_schemas_are_equal_however_they_are_written() -> None:
    assert StructuredOutputs(json={"type": "null"}) == StructuredOutputs(json='{ "type":\n"null" }')


def test_an_object_on_the_wire_may_hold_nulls_but_no_unknown_fields() -> None:
    assert StructuredOutputs.parse({"regex": "a", "json": None, "choice": None}) == StructuredOutputs(regex="a")
    with pytest.raises(RequestError) as caught:
        StructuredOutputs.parse({"regex": "a", "disable_additional_properties": True})
    assert caught.value.param == "structured_outputs.disable_additional_properties"


def test_a_schema_may_not_be_nested_beyond_reason() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        StructuredOutputs(json=nested(100_000))
