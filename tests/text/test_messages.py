from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.text.messages import normalise_messages


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_developer_is_system() -> None:
    assert normalise_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_parts_are_joined_without_a_separator() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    assert normalise_messages([{"role": "user", "content": content}])[0]["content"] == "one two"
    assert normalise_messages([{"role": "user", "content": []}])[0]["content"] == ""


def test_arguments_of_tool_calls_become_objects() -> None:
    for arguments in ('{"x": [1]}', {"x": [1]}):
        message = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}])[0]
        assert message["content"] == ""
        assert message["tool_calls"] == [call({"x": [1]})]
    empty = normalise_messages([{"role": "assistant", "tool_calls": [call("")]}])[0]
    assert empty["tool_calls"] == [call({})]


def test_other_fields_are_kept_and_null_ones_are_absent() -> None:
    message = {"role": "tool", "content": "42", "tool_call_id": "1", "name": None, "tool_calls": None}
    assert normalise_messages([message]) == [{"role": "tool", "content": "42", "tool_call_id": "1"}]


def test_normalising_twice_changes_nothing_and_never_the_caller_s_own() -> None:
    given = [{"role": "developer", "content": [{"type": "text", "text": "a"}]},
             {"role": "assistant", "tool_calls": [call('{"x": 1}')]}]  # fmt: skip
    copy = [dict(message) for message in given]
    once = normalise_messages(given)
    assert normalise_messages(once) == once
    assert given == copy


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (None, "at least one message"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of system, .*, not None"),
        ([{"role": "User", "content": "x"}], "not 'User'"),
        ([{"role": ["user"], "content": "x"}], "role must be one of"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list"),
        ([{"role": "assistant", "content": None}], "content must be a string"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\] must be an object with a function"),
        ([{"role": "assistant", "tool_calls": [call("{x")]}], "arguments is not valid JSON"),
        ([{"role": "assistant", "tool_calls": [call("[" * 100_000)]}], "arguments is not valid JSON"),
        ([{"role": "assistant", "tool_calls": [call("[1]")]}], "arguments must be a JSON object"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as raised:
        normalise_messages(messages)
    assert raised.value.param == "messages"
