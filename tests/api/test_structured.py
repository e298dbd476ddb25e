"""Structured output over HTTP and offline, under every name that clients have for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.api.openai.structured import NAMES, structured_outputs
from paceline.errors import RequestError
from support.live_server import LiveServer, events, live_server
from support.small_text import small_engine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
TAGS = {"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine()) as live:
        yield live


def text(server: LiveServer, path: str, **fields: Any) -> str:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    reply = server.post(path, **prompt, max_tokens=80, seed=1, **fields)
    assert reply.status == 200, reply.data
    [choice] = reply.json["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
        {"json_schema": SCHEMA},
    ],
    ids=str,
)
def test_json_of_a_schema(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    assert json.loads(text(server, path, **fields)) in ({"a": 1}, {"a": "x"})


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_the_other_forms(server: LiveServer, path: str) -> None:
    assert text(server, path, guided_regex="[ab]{3}c").strip("ab") == "c"
    assert text(server, path, guided_choice=["red", "green"]) in ("red", "green")
    assert text(server, path, structured_outputs={"choice": ["red"]}) == "red"
    for grammar in ('root ::= "x" [0-9] "."', 'start: "x" /[0-9]/ "."'):
        answer = text(server, path, guided_grammar=grammar)
        assert (answer[0], answer[1].isdigit(), answer[2:]) == ("x", True, ".")


def test_a_stream_joins_to_a_valid_text(server: LiveServer) -> None:
    *chunks, end = events(
        server.post(CHAT, messages=[{"role": "user", "content": "hi"}], stream=True, guided_json=SCHEMA).data
    )
    assert end == "[DONE]"
    said = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert json.loads(said) in ({"a": 1}, {"a": "x"})


def test_two_forms_exclude_each_other(server: LiveServer) -> None:
    reply = server.post(PLAIN, prompt="x", guided_regex="a", response_format={"type": "json_object"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "guided_regex")


def test_every_name_means_its_form() -> None:
    values: dict[str, Any] = {"json": {}, "json_object": True, "regex": "a", "choice": ["a"], "grammar": "x",
                              "structural_tag": TAGS}  # fmt: skip
    for name, form in NAMES.items():
        wanted, spelt = structured_outputs({name: values[form]})
        assert wanted == StructuredOutputs(**{form: values[form]})
        assert spelt[f"structured_outputs.{form}"] == name
    wanted, _ = structured_outputs({"response_format": {"type": "structural_tag", **TAGS}})
    assert wanted == StructuredOutputs(structural_tag=TAGS)
    assert structured_outputs({"response_format": {"type": "text"}, "guided_json_object": False}) == (None, {})


def test_offline_requests_have_it_in_their_parameters() -> None:
    with LLM.from_engine(small_engine()) as llm:
        params = [
            SamplingParams(max_tokens=30, structured_outputs=StructuredOutputs(choice=[c])) for c in ("up", "é\n")
        ]
        assert [output.outputs[0].text for output in llm.generate(["x", "y"], params)] == ["up", "é\n"]
        with pytest.raises(RequestError, match="unclosed") as caught:
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex="((")))
        assert caught.value.param == "structured_outputs.regex"
        with pytest.raises(RequestError):
            SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
