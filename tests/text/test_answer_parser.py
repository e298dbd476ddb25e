"""Answers taken apart: what each format comes to, and that the cutting of the text cannot matter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.text.answer_formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from paceline.text.answer_parser import AnswerParser, Piece, Thinking

NAMES = ("f", "go")
POSSIBLE, OPEN, OFF = Thinking.POSSIBLE, Thinking.OPEN, Thinking.OFF


@dataclass
class Whole:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        assert piece.reasoning or piece.content or piece.name or piece.arguments, "a piece of nothing"
        self.reasoning += piece.reasoning
        self.content += piece.content
        if piece.name is not None:
            assert (piece.call, piece.arguments) == (len(self.calls), "")
            self.calls.append((piece.name, ""))
        elif piece.call is not None:
            name, arguments = self.calls[piece.call]
            self.calls[piece.call] = (name, arguments + piece.arguments)


def parser(tools: str | None = None, reasoning: str | None = None, thinking: Thinking = OFF, **options: Any) -> Any:
    return AnswerParser(
        tools=TOOL_FORMATS[tools] if tools else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        thinking=thinking,
        names=NAMES,
        **options,
    )


def parse(parts: list[str], **settings: Any) -> Whole:
    whole, reader = Whole(), parser(**settings)
    for part in parts:
        for piece in reader.push(part):
            whole.add(piece)
    for piece in reader.finish():
        whole.add(piece)
    return whole


F = ("f", '{"a": 1}')
G = ("go", "{}")
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "Wait.", [F]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n<tool_call>{"name": "go"}', "",
     [F, G]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "go", "arguments": {}}]', "", [F, G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> so', "so", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}]\\"{</tool_call>"', "",
     [("f", '{"a": "}]\\"{</tool_call>"')]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": [1, {"b": [2]}], "x": 1}</tool_call>', "",
     [("unknown", '[1, {"b": [2]}]')]),
    ("hermes", "<tool_call>no</tool_call> <tool", "<tool_call>no</tool_call> <tool", []),
    ("hermes", '<tool_call>{"x": 5}</tool_call>', '<tool_call>{"x": 5}</tool_call>', []),
    ("hermes", ' a <b \n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n\n c ', " a <b\n\n c", [F]),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}\n{"name": "go", "arguments": {}} so', "so", [F, G]),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    ("hermes", '{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ("hermes", " only text \n", " only text \n", []),
    ("ernie", '\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n', "", [F]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '\n{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "go", "parameters": {}}',
     "", [F, G]),
    ("llama3_json", 'ok <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "ok", [F]),
    ("llama3_json", '{"answer": [1, 2]} or so', '{"answer": [1, 2]} or so', []),
    ("llama3_json", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    ("llama3_json", 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ("pythonic", "[f(a=1)]", "", [F]),
    ("pythonic", "[f(a=1), go()] done", "done", [F, G]),
    ("pythonic", "[f(s='it\\'s, (x)', n=None, t=True, l=[1, {'k': (2)}], j=false)]", "",
     [("f", '{"s": "it\'s, (x)", "n": null, "t": true, "l": [1, {"k": 2}], "j": false}')]),
    ("pythonic", "[f(a=1, b=tru", "", [("f", '{"a": 1')]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[f (a=1)]", "[f (a=1)]", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "go", "arguments": {}}]', "", [F, G]),
    ("mistral", 'x[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "x", [F]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F]),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]go[ARGS]{}', "", [F, G]),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CASES, ids=str)
def test_calls_are_read_from_every_format(tools: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = Whole("", content, calls)
    assert parse([text], tools=tools) == expected
    assert parse(list(text), tools=tools) == expected


@pytest.mark.parametrize(
    ("reasoning", "thinking", "text", "expected"),
    [
        ("qwen3", POSSIBLE, "<think>\na <b\n</think>\n\nYes.", ("a <b", "Yes.")),
        ("qwen3", POSSIBLE, "\n<think>a</think>b</think>", ("a", "b</think>")),
        ("qwen3", POSSIBLE, " <thin", ("", " <thin")),
        ("qwen3", POSSIBLE, "x<think>a</think>", ("", "x<think>a</think>")),
        ("qwen3", OPEN, "a\n\nb\n</think>\n\nYes", ("a\n\nb", "Yes")),
        ("qwen3", OPEN, "a </thi", ("a </thi", "")),
        ("qwen3", OPEN, "</think>Yes\n", ("", "Yes")),
        ("qwen3", OFF, "<think>a</think>b ", ("", "<think>a</think>b ")),
        ("deepseek_r1", OPEN, "<think>\na</think>b", ("a", "b")),
        ("ernie", OPEN, "a\n</think>\n\n<response>\nHi <there>\n</response>\n", ("a", "Hi <there>")),
        ("ernie", OPEN, "a</think>Hi", ("a", "Hi")),
    ],
)
def test_thinking_is_told_from_the_answer(
    reasoning: str, thinking: Thinking, text: str, expected: tuple[str, str]
) -> None:
    for parts in ([text], list(text)):
        whole = parse(parts, reasoning=reasoning, thinking=thinking)
        assert (whole.reasoning, whole.content, whole.calls) == (*expected, [])


def test_calls_come_after_the_thinking_only() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    whole = parse([f"<think>{call}</think>\n\n{call}"], tools="hermes", reasoning="qwen3", thinking=POSSIBLE)
    assert whole == Whole(call, "", [F])


def test_only_the_first_call_is_kept_if_they_may_not_be_parallel() -> None:
    for tools, text, _, calls in CASES:
        assert parse([text], tools=tools, parallel=False).calls == calls[:1]


PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>", "[TOOL_CALLS]", "[ARGS]",
    "<|python_tag|>", "f(a=",
    '{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": 1}}', '{"a": [1, "}"]}}',
    "[f(", "'x'", ")]", ", ", "; ", " ", "\n", "<", "{", "}", "[", "]", '"', "\\", "text", "é", '"name"', ":", "f", "(",
]  # fmt: skip


@settings(max_examples=600, derandomize=True, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    cuts=st.lists(st.integers(0, 120), max_size=12),
    tools=st.sampled_from([None, *sorted(TOOL_FORMATS)]),
    reasoning=st.sampled_from([None, "qwen3", "deepseek_r1", "ernie"]),
    thinking=st.sampled_from(list(Thinking)),
    parallel=st.booleans(),
)
def test_any_cutting_gives_the_same_as_the_whole(
    parts: list[str], cuts: list[int], tools: str | None, reasoning: str | None, thinking: Thinking, parallel: bool
) -> None:
    text = "".join(parts)
    settings = {"tools": tools, "reasoning": reasoning, "thinking": thinking, "parallel": parallel}
    at = [0, *sorted(cuts), len(text)]
    expected = parse([text], **settings)
    assert parse([text[a:b] for a, b in pairwise(at)], **settings) == expected
    assert parse(list(text), **settings) == expected
    if tools is None and reasoning is None:
        assert expected == Whole("", text)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    ascii_only=st.booleans(),
    size=st.integers(1, 9),
)
def test_arguments_come_through_unharmed(arguments: dict[str, Any], ascii_only: bool, size: int) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    call = f'{{"name": "f", "arguments": {text}}}'
    for tools, answer in [
        ("hermes", f"hm <tool_call>\n{call}\n</tool_call>"),
        ("mistral", f"hm [TOOL_CALLS][{call}]"),
        ("mistral_args", f"hm [TOOL_CALLS]f[ARGS]{text}"),
        ("llama3_json", call),
    ]:
        parts = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert parse(parts, tools=tools).calls == [("f", text)]
    words = {f"k{i}": value for i, value in enumerate(arguments.values())}
    spelt = ", ".join(f"{name}={value!r}" for name, value in words.items())
    [(_, told)] = parse([f"[f({spelt})]"], tools="pythonic").calls
    assert json.loads(told) == words


def test_arguments_are_given_out_as_they_come() -> None:
    reader = parser(tools="hermes")
    assert reader.push('<tool_call>{"name": "f", "argu') == [Piece(call=0, name="f")]
    assert reader.push('ments": {"a": ') == [Piece(call=0, arguments='{"a": ')]
    assert reader.push("1}") == [Piece(call=0, arguments="1}")]
    assert reader.push("}</tool_call>") == []
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call>{{ tools }}</tool_call>", None, "hermes"),
        ("<think>\n\n</think> <tool_call>", "qwen3", "hermes"),
        ("</think><response>", "ernie", None),
        ("[TOOL_CALLS]", None, "mistral"),
        ("[TOOL_CALLS] [ARGS]", None, "mistral_args"),
        ("<|python_tag|>", None, "llama3_json"),
        ("<tool_call><function=f>", None, None),
    ],
)
def test_formats_are_told_by_the_template(template: str, reasoning: str | None, tools: str | None) -> None:
    assert reasoning_format("auto", template) is (REASONING_FORMATS[reasoning] if reasoning else None)
    assert tool_format("auto", template) is (TOOL_FORMATS[tools] if tools else None)


def test_formats_have_the_names_that_people_type() -> None:
    assert reasoning_format("ernie-45-vl-thinking", "") is REASONING_FORMATS["ernie"]
    assert tool_format("ernie-x1", "") is TOOL_FORMATS["ernie"]
    assert tool_format("none", "<tool_call>") is None
    with pytest.raises(ConfigError, match=r"tool_call_parser must be .*hermes"):
        tool_format("unheard-of", "")
