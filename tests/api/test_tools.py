"""Tools and thinking in chats, as the reference client reads them: whole, streamed, and where a call has to be made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.text.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from support.live_server import LiveServer, events, live_server
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import END, START, byte_tokenizer, small_engine

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}T{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
    "{% if thinks is defined %}{{ '<think>\n' if thinks else '<think>\n\n</think>\n\n' }}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}, "c": {"type": "null"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "go"}},
]
CALLS = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "go"}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "f"}}


def prompt_length(tools: str = "Tfgo", tail: str = "") -> int:
    return len(f"{tools}<user\nhi><assistant\n{tail}")


@pytest.fixture
def says() -> Iterator[Any]:
    """Starts a server whose model answers with a text, and then ends."""
    running = []

    def start(text: str, *, tools: str | None = "hermes", reasoning: str | None = None, **length: Any) -> LiveServer:
        engine = small_engine(
            ScriptedRunner(saying(prompt_length(**length), text)),
            template=TEMPLATE,
            tools=TOOL_FORMATS[tools] if tools else None,
            reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
            max_model_len=400,
        )
        manager = live_server(engine)
        running.append(manager)
        return manager.__enter__()

    yield start
    for manager in running:
        manager.__exit__(None, None, None)


def whole(server: LiveServer, **fields: Any) -> Any:
    reply = server.post(PATH, messages=MESSAGES, **fields)
    assert reply.status == 200, reply.data
    ChatCompletion.model_validate(reply.json, strict=True)
    return reply.json["choices"][0]


def streamed(server: LiveServer, **fields: Any) -> Any:
    """The choice that a stream's chunks join to, as a client joins them."""
    *values, end = events(server.post(PATH, messages=MESSAGES, stream=True, **fields).data)
    assert end == "[DONE]"
    choice: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": []}
    for value in values:
        chunk = ChatCompletionChunk.model_validate(value).choices[0]
        assert choice.get("finish_reason") is None, "a chunk behind the last"
        choice["finish_reason"] = chunk.finish_reason
        choice["content"] += chunk.delta.content or ""
        choice["reasoning"] += value["choices"][0]["delta"].get("reasoning_content", "")
        for call in chunk.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(choice["calls"]), "function", "")
                choice["ids"].append(call.id)
                choice["calls"].append([call.function.name, ""])
            else:
                assert (call.type, call.function.name) == (None, None)
                choice["calls"][call.index][1] += call.function.arguments or ""
        if chunk.finish_reason is not None:
            assert value["choices"][0]["delta"] == {}
    return choice


def test_calls_are_told_whole_and_in_a_stream(says: Any) -> None:
    server = says(CALLS)
    choice = whole(server, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    told = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    assert told == [["f", '{"a": 1}'], ["go", "{}"]]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    stream = streamed(server, tools=TOOLS)
    assert (stream["content"], stream["calls"], stream["finish_reason"]) == ("", told, "tool_calls")
    assert len(set(stream["ids"])) == 2


def test_the_reference_client_reads_calls(says: Any) -> None:
    client = says(CALLS).client()
    with client.chat.completions.stream(model="small", messages=MESSAGES, tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["f", "go"]


def test_what_a_call_is_not(says: Any) -> None:
    server = says(CALLS, tools=None)
    assert whole(server, tools=TOOLS)["message"]["content"] == CALLS
    server = says("no calls \n")
    assert whole(server, tools=TOOLS)["message"] == {"role": "assistant", "content": "no calls \n", "refusal": None}
    assert streamed(server, tools=TOOLS)["finish_reason"] == "stop"


def test_without_tools_or_with_the_choice_none_text_is_text() -> None:
    runner = ScriptedRunner(saying(prompt_length(tools=""), CALLS))
    with live_server(
        small_engine(runner, template=TEMPLATE, tools=TOOL_FORMATS["hermes"], max_model_len=400)
    ) as server:
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = whole(server, **fields)
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


def test_only_the_first_call_without_parallel_calls(says: Any) -> None:
    server = says(CALLS)
    assert arguments_of(whole(server, tools=TOOLS, parallel_tool_calls=False)) == [("f", {"a": 1})]
    assert streamed(server, tools=TOOLS, parallel_tool_calls=False)["calls"] == [["f", '{"a": 1}']]


def test_a_call_that_is_cut_short_ends_by_length(says: Any) -> None:
    choice = whole(says(CALLS), tools=TOOLS, max_tokens=45)
    assert choice["finish_reason"] == "length"
    assert CALLS.replace("\n", "").find(choice["message"]["tool_calls"][0]["function"]["arguments"]) > 0


def test_ids_have_the_form_that_the_model_knows(says: Any) -> None:
    server = says('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', tools="mistral")
    [call] = whole(server, tools=TOOLS)["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_logprobs_and_ids_come_once_though_text_is_held_back(says: Any) -> None:
    server = says(CALLS)
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    choice = whole(server, **fields)
    assert bytes(choice["token_ids"][:-1]) == CALLS.encode()
    assert len(choice["logprobs"]["content"]) == len(CALLS) + 1
    values = events(server.post(PATH, messages=MESSAGES, stream=True, **fields).data)[:-1]
    parts = [value["choices"][0] for value in values]
    assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
    entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]


# ---- thinking


@pytest.mark.parametrize(
    ("thinks", "tail", "text", "reasoning", "content"),
    [
        (None, "", "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        (None, "", "Yes", "", "Yes"),
        (True, "<think>\n", "hm\n</think>\n\nYes", "hm", "Yes"),
        (True, "<think>\n", "hm", "hm", ""),
        (False, "<think>\n\n</think>\n\n", "<think>", "", "<think>"),
    ],
)
def test_thinking_starts_as_the_prompt_says(
    says: Any, thinks: bool | None, tail: str, text: str, reasoning: str, content: str
) -> None:
    server = says(text, reasoning="qwen3", tail=tail)
    fields: dict[str, Any] = {} if thinks is None else {"chat_template_kwargs": {"thinks": thinks}}
    choice = whole(server, tools=TOOLS, **fields)
    assert (choice["message"].get("reasoning_content", ""), choice["message"]["content"]) == (reasoning, content)
    stream = streamed(server, tools=TOOLS, **fields)
    assert (stream["reasoning"], stream["content"]) == (reasoning, content)
    usage = server.post(PATH, messages=MESSAGES, tools=TOOLS, **fields).json["usage"]
    inside = text.removeprefix("<think>").partition("</think>")[0] if reasoning else ""
    ends = 1 if reasoning == text else 0  # the end token of an answer that never got further is a part of it
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(inside) + ends}


def test_calls_come_after_thinking(says: Any) -> None:
    choice = whole(says(f"<think>hm</think>{CALLS}", reasoning="ernie", tools="ernie"), tools=TOOLS)
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("hm", "tool_calls")
    assert len(choice["message"]["tool_calls"]) == 2


def test_earlier_thinking_and_calls_reach_the_template() -> None:
    server = small_engine(template=TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}, *MESSAGES]
    with live_server(server) as live:
        ids = live.post("/tokenize", messages=messages).json["tokens"]
    assert "hmf7" in byte_tokenizer().decode(ids, skip_special=True)


def test_structured_output_begins_after_the_thinking() -> None:
    engine = small_engine(template=TEMPLATE, reasoning=REASONING_FORMATS["qwen3"])
    form = {"structured_outputs": {"choice": ["yes"]}, "max_tokens": 60}
    with live_server(engine) as server:
        for seed in range(4):
            # Nothing is open, and this tokenizer has no one token that could open it.
            assert whole(server, **form, seed=seed)["message"]["content"] == "yes"
            closed = whole(server, **form, seed=seed, chat_template_kwargs={"thinks": False})
            assert closed["message"]["content"] == "yes"
            open_one = whole(server, **form, seed=seed, chat_template_kwargs={"thinks": True})
            assert open_one["message"]["reasoning_content"]
    with LLM.from_engine(small_engine(template=TEMPLATE, reasoning=REASONING_FORMATS["qwen3"])) as llm:
        params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(choice=["yes"]))
        answers = [
            llm.chat(MESSAGES, params, chat_template_kwargs={"thinks": thinks})[0].outputs[0].text
            for thinks in (False, True)
        ]
        assert answers[0] == "yes"
        assert answers[1] != "yes"


# ---- calls that have to be made


@pytest.fixture(scope="module", params=sorted(TOOL_FORMATS))
def caller(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A model without sense, for each format."""
    with live_server(small_engine(template=TEMPLATE, tools=TOOL_FORMATS[request.param])) as live:
        yield live


def arguments_of(choice: Any) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", ())
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def check(name: str, arguments: Any) -> None:
    if name == "f":
        jsonschema.validate(arguments, PARAMETERS)
    else:
        assert (name, arguments) == ("go", {})


def test_a_required_call_is_made(caller: LiveServer) -> None:
    names = set()
    for seed in range(6):
        choice = whole(caller, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [(name, arguments)] = arguments_of(choice)
        check(name, arguments)
        names.add(name)
    assert names <= {"f", "go"}


def test_a_named_function_is_called(caller: LiveServer) -> None:
    for seed in range(3):
        choice = whole(caller, tools=TOOLS, tool_choice=NAMED, seed=seed, parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls"
        [(name, arguments)] = arguments_of(choice)
        assert name == "f"
        jsonschema.validate(arguments, PARAMETERS)


def test_a_required_stream_joins_to_valid_calls(caller: LiveServer) -> None:
    stream = streamed(caller, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2)
    [(name, arguments)] = stream["calls"]
    check(name, json.loads(arguments))


# ---- tags that are control tokens


def tagged(**changes: Any) -> Any:
    return replace(TOOL_FORMATS["hermes"], begin="<start>", end="<end>", **changes)


def test_control_tokens_tell_calls_but_stay_out_of_other_answers() -> None:
    answer = [*b"so ", START, *b'{"name": "go"}', END]
    cases: list[tuple[int, Any, str]] = [
        (prompt_length(), {"tools": TOOLS}, "so"),
        (prompt_length(""), {}, 'so {"name": "go"}'),
    ]
    for length, fields, content in cases:
        runner = ScriptedRunner(saying(length, answer))
        with live_server(small_engine(runner, template=TEMPLATE, tools=tagged())) as server:
            choice = whole(server, **fields)
            assert choice["message"]["content"] == content
            assert arguments_of(choice) == ([("go", {})] if fields else [])


def test_a_required_call_is_written_with_control_tokens() -> None:
    with live_server(small_engine(template=TEMPLATE, tools=tagged())) as server:
        choice = whole(server, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, return_token_ids=True)
        assert (choice["token_ids"][0], choice["token_ids"][-1]) == (START, END)
        assert arguments_of(choice)[0][0] == "f"


def test_a_model_may_open_its_thinking_before_a_structured_answer() -> None:
    thinks = replace(REASONING_FORMATS["qwen3"], begin="<start>", end="<end>")
    with live_server(small_engine(template=TEMPLATE, reasoning=thinks)) as server:
        seen = set()
        for seed in range(60):
            choice = whole(server, guided_choice=["a", "b", "c"], seed=seed, temperature=2, return_token_ids=True)
            opened = choice["token_ids"][0] == START
            seen.add(opened)
            if not opened or choice["finish_reason"] == "stop":
                assert choice["message"]["content"] in ("a", "b", "c")
        assert seen == {True, False}


def refused(server: LiveServer, **fields: Any) -> Any:
    reply = server.post(PATH, messages=MESSAGES, **fields)
    assert reply.status == 400, reply.data
    return reply.json["error"]["param"], reply.json["error"]["message"]


def test_what_cannot_be_called_is_refused() -> None:
    hermes = TOOL_FORMATS["hermes"]
    with live_server(small_engine(tools=hermes)) as server:
        param, message = refused(server, tools=TOOLS, tool_choice="required")
        assert param == "tool_choice"
        assert "template" in message
    with live_server(small_engine(template=TEMPLATE)) as server:
        assert "tool_call_parser" in refused(server, tools=TOOLS, tool_choice=NAMED)[1]
    with live_server(small_engine(template=TEMPLATE, tools=hermes)) as server:
        assert refused(server, tool_choice="required")[0] == "tool_choice"
        assert refused(server, tools=[], tool_choice=NAMED)[0] == "tool_choice"
        nobody = {"type": "function", "function": {"name": "nobody"}}
        assert "nobody" in refused(server, tools=TOOLS, tool_choice=nobody)[1]
        bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
        assert refused(server, tools=bad, tool_choice="required")[0] == "tools"
        assert refused(server, tools=TOOLS, guided_regex="a")[0] == "guided_regex"
        assert whole(server, tools=TOOLS, tool_choice="none", guided_regex="a")["message"]["content"] == "a"


@pytest.mark.parametrize("tools", ["hermes", "pythonic", "mistral_args"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": "thing"}}},
        {"properties": {"a": {}}, "required": "a"},
        {"properties": {"a": {"const": "x" * 50_000}, "b": {"const": "y" * 90_000}}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_parameters_that_cannot_be_a_grammar_are_the_callers(tools: str, parameters: dict[str, Any]) -> None:
    with live_server(small_engine(template=TEMPLATE, tools=TOOL_FORMATS[tools])) as server:
        bad = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        assert refused(server, tools=bad, tool_choice="required")[0] == "tools"
