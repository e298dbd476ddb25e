"""Thinking over HTTP: its budget, and the fields that tell the template of it. Also the early stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from paceline.text.chat_template import ChatTemplate
from paceline.text.thinking import find_thinking_tags
from paceline.types import LogprobsMode
from support.live_server import LiveServer, live_server
from support.small_text import byte_tokenizer, small_engine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}|{% endfor %}"
    "{% if thinking is defined %}[{{ thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif %}"
)
CLOSE = "\n</think>\n\n"


def thinking_server(**changes: Any) -> AbstractContextManager[LiveServer]:
    """Around a model that thinks; ``changes`` are to what is known of it."""
    loaded = small_engine()
    tags = find_thinking_tags(byte_tokenizer(), TEMPLATE)
    info = replace(loaded.info, chat_template=ChatTemplate(TEMPLATE), thinking=tags, **changes)
    return live_server(replace(loaded, info=info))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with thinking_server() as live:
        yield live


@pytest.mark.parametrize("field", ["reasoning_max_tokens", "thinking_token_budget"])
@pytest.mark.parametrize("budget", [0, 7])
def test_a_thinking_is_closed_when_its_budget_is_used(server: LiveServer, field: str, budget: int) -> None:
    asked = {"seed": 3, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    choice = server.post(CHAT, messages=MESSAGES, **asked, **{field: budget}).json["choices"][0]
    plain = server.post(CHAT, messages=MESSAGES, **asked).json["choices"][0]
    tokens = choice["token_ids"]
    assert bytes(tokens[budget : budget + len(CLOSE)]).decode() == CLOSE
    assert tokens[:budget] == plain["token_ids"][:budget]
    assert len(tokens) == 30
    assert choice["finish_reason"] == "length"
    # A raw prompt that leaves the block open thinks, too; and one that does not, does not.
    prompt = server.post("/tokenize", messages=MESSAGES).json["tokens"]
    assert server.post(PLAIN, prompt=prompt, **asked, **{field: budget}).json["choices"][0]["token_ids"] == tokens
    closed = [*prompt, *b"</think>"]
    assert (
        server.post(PLAIN, prompt=closed, **asked, **{field: budget}).json["choices"][0]["token_ids"]
        == server.post(PLAIN, prompt=closed, **asked).json["choices"][0]["token_ids"]
    )


def test_forced_tokens_have_the_models_probability_or_are_certain_if_that_is_what_is_reported() -> None:
    fields = {"messages": MESSAGES, "reasoning_max_tokens": 0, "max_tokens": 3, "logprobs": True}
    for mode, certain in ((LogprobsMode.RAW_LOGPROBS, False), (LogprobsMode.PROCESSED_LOGPROBS, True)):
        with thinking_server(logprobs_mode=mode) as server:
            content = server.post(CHAT, **fields).json["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == list("\n</")
        assert all((entry["logprob"] == 0) is certain for entry in content)


def rendered(server: LiveServer, **fields: Any) -> str:
    tokens = server.post("/tokenize", messages=MESSAGES, **fields).json["tokens"]
    answer = server.post(CHAT, messages=MESSAGES, max_tokens=1, return_token_ids=True, **fields).json
    assert answer["prompt_token_ids"] == tokens
    return byte_tokenizer().decode(tokens, skip_special=False)


def test_the_template_is_told_by_the_names_that_it_knows(server: LiveServer) -> None:
    assert rendered(server) == "hi|<think>\n"
    assert rendered(server, enable_thinking=True) == "hi|[True]<think>\n"
    assert rendered(server, enable_thinking=False) == "hi|[False]<think>\n</think>\n\n"
    assert rendered(server, reasoning_effort="low") == "hi|[low]<think>\n"
    assert rendered(server, chat_template_kwargs={"enable_thinking": False}) == "hi|<think>\n</think>\n\n"
    both = rendered(server, enable_thinking=False, chat_template_kwargs={"enable_thinking": False})
    assert both == rendered(server, enable_thinking=False)


def test_a_thinking_that_is_off_has_nothing_to_end(server: LiveServer) -> None:
    asked = {"messages": MESSAGES, "seed": 3, "max_tokens": 20, "enable_thinking": False}
    contents = [
        server.post(CHAT, **asked, **more).json["choices"][0]["message"]["content"]
        for more in ({}, {"reasoning_max_tokens": 0})
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "differ"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "differ"),
        ({"enable_thinking": "yes"}, "bool"),
        ({"reasoning_effort": ""}, "1 char"),
    ],
)
def test_what_contradicts_itself_is_refused(server: LiveServer, fields: dict[str, Any], message: str) -> None:
    reply = server.post(CHAT, messages=MESSAGES, **fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == next(iter(fields))
    assert message in reply.json["error"]["message"]


def test_a_model_that_does_not_think_need_not_be_told_not_to() -> None:
    with live_server(small_engine()) as server:
        assert server.post(CHAT, messages=MESSAGES, max_tokens=1, enable_thinking=False).status == 200


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_an_early_stop_ends_after_a_window_of_likely_tokens(server: LiveServer, path: str) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    asked = {**prompt, "allowed_token_ids": [97], "max_tokens": 20}
    choice = server.post(path, **asked, early_stop={"window": 5, "threshold": 0.99}).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    assert (choice["text"] if path == PLAIN else choice["message"]["content"]) == "a" * 5
    choice = server.post(path, **asked, early_stop={"window": 5, "threshold": 1}).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    choice = server.post(path, **asked, early_stop={"window": 5}, min_tokens=9).json["choices"][0]
    assert (choice["text"] if path == PLAIN else choice["message"]["content"]) == "a" * 9
