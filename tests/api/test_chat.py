"""Chat completions: shapes, streams, usage and log-probabilities, as the reference client reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline.api.openai.requests import ChatBody
from paceline.api.openai.unsupported import UNSUPPORTED
from support.live_server import LiveServer, events, live_server
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import EOS, byte_tokenizer, small_engine

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
PROMPT = len("<user\nhi>") + len("<assistant\n")
"""Tokens that the template makes of it; a control token is one."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine(), served_model_names=("small", "alias/small")) as live:
        yield live


@pytest.fixture
def says() -> Iterator[Any]:
    """Starts a server whose model answers the messages with a text, and then ends."""
    running = []

    def start(text: str | bytes) -> LiveServer:
        manager = live_server(small_engine(ScriptedRunner(saying(PROMPT, text))))
        running.append(manager)
        return manager.__enter__()

    yield start
    for manager in running:
        manager.__exit__(None, None, None)


def chunks_of(server: LiveServer, **fields: Any) -> list[ChatCompletionChunk]:
    *values, end = events(server.post(PATH, **{"messages": MESSAGES, "stream": True, **fields}).data)
    assert end == "[DONE]"
    return [ChatCompletionChunk.model_validate(value) for value in values]


def test_an_answer_has_the_shape_of_the_reference_client(says: Any) -> None:
    reply = says("Hello!").post(PATH, messages=MESSAGES)
    answer = ChatCompletion.model_validate(reply.json, strict=True)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "small")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert reply.json["choices"][0]["stop_reason"] is None
    assert answer.usage is not None
    # The token that ended the answer was generated too.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT, 7)
    assert answer.usage.total_tokens == PROMPT + 7


def test_a_stream_is_role_content_finish_and_end(says: Any) -> None:
    chunks = chunks_of(says("Hello!"))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in middle] == list("Hello!")
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in middle)
    assert last.choices[0].delta.content is None
    assert last.choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_is_sent_as_server_sent_events(server: LiveServer) -> None:
    reply = server.post(PATH, messages=MESSAGES, stream=True, max_tokens=2)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.data.endswith(b"data: [DONE]\n\n")
    assert b'"usage"' not in reply.data


def test_the_reference_client_reads_a_stream(says: Any) -> None:
    stream = (
        says("Grüße, 世界 😀\u2028!")
        .client()
        .chat.completions.create(model="small", messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    )
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Grüße, 世界 😀\u2028!"
    assert usage is not None
    assert usage.completion_tokens == len(text.encode()) + 1


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"temperature": 0}])
def test_the_deltas_join_to_the_answer_in_one_piece(server: LiveServer, params: dict[str, Any]) -> None:
    fields = {"seed": 11, "max_tokens": 40, "return_token_ids": True, **params}
    whole = server.post(PATH, messages=MESSAGES, **fields).json
    values = events(server.post(PATH, messages=MESSAGES, stream=True, **fields).data)[:-1]
    assert values[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        mine = [c for value in values for c in value["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [i for c in mine for i in c.get("token_ids", ())] == choice["token_ids"]
        assert [e for c in mine for e in (c["logprobs"] or {"content": ()})["content"]] == (
            choice["logprobs"] or {"content": []}
        )["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert all(c["delta"]["content"] for c in mine[1:-1]), "an empty chunk in the middle"


def test_usage_is_streamed_only_if_asked_for(server: LiveServer) -> None:
    *others, last = chunks_of(server, ignore_eos=True, max_tokens=5, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens == PROMPT + 5
    raw = events(server.post(PATH, messages=MESSAGES, stream=True, stream_options={"include_usage": True}).data)
    assert all("usage" in value for value in raw[:-1])
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None, {"continuous_usage_stats": True}):
        fields = {"stream": True, "ignore_eos": True, "max_tokens": 3, "stream_options": options}
        raw = events(server.post(PATH, messages=MESSAGES, **fields).data)
        assert all("usage" not in value for value in raw[:-1])
        assert raw[-2]["choices"][0]["finish_reason"] == "length"


def test_continuous_usage_counts_up(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in chunks_of(server, ignore_eos=True, max_tokens=6, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_cached_tokens_are_a_part_of_the_prompt(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "a prompt of several blocks"}]
    server.post(PATH, messages=messages, max_tokens=1)
    usage = server.post(PATH, messages=messages, max_tokens=1).json["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    salted = server.post(PATH, messages=messages, max_tokens=1, cache_salt="mine").json["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["prompt_tokens"] == usage["prompt_tokens"]


def test_logprobs_list_each_token_and_the_likeliest(server: LiveServer) -> None:
    reply = server.post(PATH, messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    answer = ChatCompletion.model_validate(reply.json, strict=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 8
    for entry in content:
        assert len(entry.top_logprobs) == 3
        # Greedy: the token is the likeliest one.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
        assert entry.bytes is not None
        shown = bytes(entry.bytes)
        assert entry.token == (shown.decode() if shown.isascii() else f"bytes:\\x{entry.bytes[0]:02x}")
    plain = server.post(PATH, messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True).json
    assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])
    assert server.post(PATH, messages=MESSAGES, max_tokens=1, logprobs=False).json["choices"][0]["logprobs"] is None


def test_prompt_logprobs_come_by_id_and_position(server: LiveServer) -> None:
    answer = server.post(PATH, messages=MESSAGES, max_tokens=0, prompt_logprobs=2, return_token_ids=True).json
    entries = answer["prompt_logprobs"]
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert entries[0] is None
    assert len(entries) == len(answer["prompt_token_ids"]) == PROMPT
    for token, entry in zip(answer["prompt_token_ids"][1:], entries[1:], strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {e["rank"] for e in entry.values()}


def test_without_a_limit_the_answer_may_fill_the_context(server: LiveServer) -> None:
    usage = server.post(PATH, messages=MESSAGES, ignore_eos=True).json["usage"]
    assert usage["total_tokens"] == 128
    clamped = server.post(PATH, messages=MESSAGES, ignore_eos=True, max_tokens=1000).json
    assert clamped["usage"]["total_tokens"] == 128
    assert clamped["choices"][0]["finish_reason"] == "length"


def test_the_newer_name_of_the_limit_wins(server: LiveServer) -> None:
    fields = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 9, "max_completion_tokens": 4}
    assert server.post(PATH, **fields).json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_is_named(says: Any, stream: bool) -> None:
    server = says("one two three")
    fields = {"messages": MESSAGES, "stop": ["xyz", "o t"], "stream": stream}
    reply = server.post(PATH, **fields)
    if stream:
        choices = [value["choices"][0] for value in events(reply.data)[:-1]]
        text, last = "".join(c["delta"].get("content", "") for c in choices), choices[-1]
    else:
        last = reply.json["choices"][0]
        text = last["message"]["content"]
        assert reply.json["usage"]["completion_tokens"] == len("one two t")
    assert (text, last["finish_reason"], last["stop_reason"]) == ("one tw", "stop", "o t")


def test_a_stop_token_is_named(says: Any) -> None:
    choice = says("abc").post(PATH, messages=MESSAGES, stop_token_ids=[ord("c")]).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ord("c"))


def test_null_is_the_same_as_absent(server: LiveServer) -> None:
    optional = (set(ChatBody.model_fields) | set(UNSUPPORTED)) - {"messages", "seed", "max_tokens"}
    fields = {"messages": MESSAGES, "seed": 3, "max_tokens": 6}
    plain = server.post(PATH, **fields).json["choices"]
    assert server.post(PATH, **fields, **dict.fromkeys(optional)).json["choices"] == plain


def test_what_asks_for_nothing_is_accepted(server: LiveServer) -> None:
    ignored = {
        "tools": [], "tool_choice": "auto", "functions": [], "response_format": {"type": "text"},
        "modalities": ["text"], "parallel_tool_calls": True, "user": "u", "metadata": {"a": "b"}, "store": True,
        "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "something_new": {"x": [1]},
        "best_of": 1, "echo": False,
    }  # fmt: skip
    assert server.post(PATH, messages=MESSAGES, max_tokens=1, **ignored).status == 200


def test_parts_of_a_content_are_joined(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    fields = {"seed": 3, "max_tokens": 6}
    split = server.post(PATH, messages=[{"role": "user", "content": parts}], **fields).json
    assert split["choices"] == server.post(PATH, messages=MESSAGES, **fields).json["choices"]


def test_the_final_message_can_be_continued(server: LiveServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "So"}]
    answer = server.post(PATH, messages=messages, continue_final_message=True, max_tokens=1, return_token_ids=True).json
    text = byte_tokenizer().decode(answer["prompt_token_ids"], skip_special=False)
    assert text == "<start>user\nhi<end><start>assistant\nSo"


def test_control_tokens_in_a_message_are_plain_text(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "<eos>"}]
    ids = server.post(PATH, messages=messages, max_tokens=1, return_token_ids=True).json["prompt_token_ids"]
    assert EOS not in ids


def test_the_answer_carries_the_name_that_was_asked_for(server: LiveServer) -> None:
    assert server.post(PATH, messages=MESSAGES, max_tokens=1).json["model"] == "small"
    assert server.post(PATH, messages=MESSAGES, max_tokens=1, model="alias/small").json["model"] == "alias/small"


def test_a_seed_repeats_the_answer_and_choices_differ(server: LiveServer) -> None:
    fields = {"messages": MESSAGES, "seed": 5, "n": 4, "max_tokens": 12}
    first = [choice["message"]["content"] for choice in server.post(PATH, **fields).json["choices"]]
    assert first == [choice["message"]["content"] for choice in server.post(PATH, **fields).json["choices"]]
    assert len(set(first)) == 4
    alone = server.post(PATH, messages=MESSAGES, seed=5, max_tokens=12).json["choices"][0]["message"]["content"]
    assert alone == first[0]


def test_a_chat_template_of_the_request_needs_the_servers_trust(server: LiveServer) -> None:
    refused = server.post(PATH, messages=MESSAGES, max_tokens=1, chat_template="{{ messages[0].content }}")
    assert (refused.status, refused.json["error"]["param"]) == (400, "chat_template")
    assert "trust_request_chat_template" in refused.json["error"]["message"]


def test_a_trusted_chat_template_of_the_request_replaces_the_models() -> None:
    with live_server(small_engine(), trust_request_chat_template=True) as live:

        def tokens(**fields: Any) -> Any:
            return live.post("/tokenize", messages=MESSAGES, **fields).json["tokens"]

        own = "{{ mood }}{{ messages[0].content }}{{ eos_token }}"
        assert tokens(chat_template=own, chat_template_kwargs={"mood": "x"}) == [*b"xhi", EOS]
        assert len(tokens()) == PROMPT
        reply = live.post(PATH, messages=MESSAGES, max_tokens=1, chat_template="{{ messages[0].content }}")
        assert reply.json["usage"]["prompt_tokens"] == 2
        for bad in ("", "{% if %}", "x" * 65537):
            wrong = live.post(PATH, messages=MESSAGES, max_tokens=1, chat_template=bad)
            assert (wrong.status, wrong.json["error"]["param"]) == (400, "chat_template")
        for runaway in ("{% for i in range(10**9) %}{% endfor %}",):
            slow = live.post(PATH, messages=MESSAGES, max_tokens=1, chat_template=runaway)
            assert (slow.status, slow.json["error"]["param"]) == (400, "messages")
