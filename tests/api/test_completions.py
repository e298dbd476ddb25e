"""Plain completions: prompt forms, echo and scoring, shapes and streams."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types import Completion

from paceline.api.openai.requests import CompletionBody
from paceline.api.openai.unsupported import UNSUPPORTED
from support.live_server import LiveServer, events, live_server
from support.naive_twin import NaiveTwin
from support.random_model import random_checkpoint
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import EOS, byte_tokenizer, small_engine

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine()) as live:
        yield live


def ids(text: str) -> list[int]:
    return list(text.encode())


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_an_answer_has_the_shape_of_the_reference_client(server: LiveServer) -> None:
    answer = Completion.model_validate(server.post(PATH, prompt="hello", seed=1).json, strict=True)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "small")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 16, 21)


def test_all_forms_of_a_prompt_give_the_same_answers(server: LiveServer) -> None:
    fields = {"seed": 4, "max_tokens": 8}
    one = texts(server.post(PATH, prompt="first", **fields).json)
    other = texts(server.post(PATH, prompt="other one", **fields).json)
    assert texts(server.post(PATH, prompt=ids("first"), **fields).json) == one
    assert texts(server.post(PATH, prompt=["first", "other one"], **fields).json) == one + other
    assert texts(server.post(PATH, prompt=[ids("first"), ids("other one")], **fields).json) == one + other


def test_choices_of_several_prompts_are_ordered_and_counted(server: LiveServer) -> None:
    fields = {"seed": 4, "max_tokens": 6, "n": 3}
    answer = server.post(PATH, prompt=["first", "other one"], **fields).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    solo = [texts(server.post(PATH, prompt=prompt, **fields).json) for prompt in ("first", "other one")]
    assert texts(answer) == solo[0] + solo[1]
    assert answer["usage"]["prompt_tokens"] == len("first") + len("other one")
    assert answer["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 3},
        {"echo": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 0, "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"logprobs": 1, "stop": ["a", "\x07", "B"], "n": 4},
    ],
)
def test_the_pieces_of_a_stream_join_to_the_answer_in_one_piece(server: LiveServer, params: dict[str, Any]) -> None:
    fields = {
        "prompt": [ids("first"), ids("other é one")],
        "seed": 9,
        "max_tokens": 30,
        "return_token_ids": True,
        **params,
    }
    whole = server.post(PATH, **fields).json
    options = {"include_usage": True}
    *values, end = events(server.post(PATH, **fields, stream=True, stream_options=options).data)
    assert end == "[DONE]"
    assert values[-1]["choices"] == []
    assert values[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({value["id"] for value in values}) == 1
    for choice in whole["choices"]:
        mine = [c for value in values for c in value["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values_in_one_piece in choice["logprobs"].items():
                assert [v for c in mine for v in c["logprobs"][name]] == values_in_one_piece
        assert all(c["text"] or c["finish_reason"] or fields.get("echo") for c in mine)


def test_logprobs_have_four_lists_of_one_length(server: LiveServer) -> None:
    fields = {"prompt": "hello", "temperature": 0, "max_tokens": 9, "ignore_eos": True, "logprobs": 3}
    logprobs = server.post(PATH, **fields).json["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {9}
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert len(top) == 3
        # Greedy, and to the bit: harnesses compare these for equality.
        assert top[token] == logprob == max(top.values())


def test_no_likeliest_tokens_still_show_the_chosen_one(server: LiveServer) -> None:
    logprobs = server.post(PATH, prompt="hello", max_tokens=5, logprobs=0).json["choices"][0]["logprobs"]
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert top == {token: logprob}


def test_a_harness_can_score_prompts_of_ids(server: LiveServer) -> None:
    prompts = [ids("the context and its continuation"), ids("another")]
    fields = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    answer = server.post(PATH, **fields).json
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert value <= max(top.values())
            assert value in top.values()
        assert choice["text"].startswith(bytes(prompt).decode())
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_a_harness_makes_of_the_scores_equals_a_direct_computation(max_tokens: int) -> None:
    twin = NaiveTwin(random_checkpoint(vocab_size=264))
    context, endings = "Once upon a time there", [" was", " were two", "fore"]
    requests = [ids(context + ending) for ending in endings]
    # Chunks of five tokens, of all prompts at once.
    with live_server(small_engine(max_num_batched_tokens=5)) as server:
        fields = {"temperature": 0, "logprobs": 1, "echo": True, "seed": 1234, "max_tokens": max_tokens}
        choices = server.post(PATH, prompt=requests, **fields).json["choices"]
    for tokens, choice in zip(requests, choices, strict=True):
        own = slice(len(context), len(tokens))
        z = twin.logits(tokens)
        logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        direct = [logprobs[p - 1, tokens[p]] for p in range(len(context), len(tokens))]
        scores = choice["logprobs"]["token_logprobs"][own]
        assert scores == pytest.approx(direct, abs=1e-3)
        assert sum(scores) == pytest.approx(sum(direct), abs=1e-3)
        is_greedy = [score == max(top.values()) for score, top in zip(scores, choice["logprobs"]["top_logprobs"][own])]
        best = z[:, :259].argmax(axis=1)
        assert is_greedy == [best[p - 1] == tokens[p] for p in range(len(context), len(tokens))]


def test_a_prompt_is_scored_alike_whatever_follows(server: LiveServer) -> None:
    def score(**fields: Any) -> list[float | None]:
        answer = server.post(PATH, prompt="some text", echo=True, logprobs=1, **fields).json
        scores: list[float | None] = answer["choices"][0]["logprobs"]["token_logprobs"][: len("some text")]
        return scores

    assert score(max_tokens=0) == score(max_tokens=1) == score(max_tokens=5, n=2, logit_bias={"5": 9})
    only = server.post(PATH, prompt="some text", echo=True, logprobs=1, max_tokens=0).json
    assert only["choices"][0]["text"] == "some text"
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["usage"]["completion_tokens"] == 0
    # What the model would have said of these bytes one by one.
    for end in (3, 8):
        step = server.post(PATH, prompt="some text"[:end], max_tokens=1, logprobs=20, temperature=0).json
        chosen = ord("some text"[end])
        forced = server.post(PATH, prompt="some text"[:end], max_tokens=1, logprobs=0, allowed_token_ids=[chosen]).json
        assert step["choices"][0]["logprobs"]["tokens"]
        assert forced["choices"][0]["logprobs"]["token_logprobs"][0] == score(max_tokens=0)[end]


def test_logprobs_may_be_those_that_tokens_are_sampled_from(server: LiveServer) -> None:
    def logprobs(**fields: Any) -> dict[str, Any]:
        asked = {"prompt": "hello", "max_tokens": 1, "logprobs": 3, "seed": 5, "temperature": 0.5, **fields}
        found: dict[str, Any] = server.post(PATH, **asked).json["choices"][0]["logprobs"]["top_logprobs"][0]
        return found

    plain, scaled = logprobs(), logprobs(temp_scaled_logprobs=True)
    best, second, *_ = sorted(plain, key=lambda name: -plain[name])
    assert scaled[best] - scaled[second] == pytest.approx(2 * (plain[best] - plain[second]), abs=1e-5)
    alone = logprobs(top_p_normalized_logprobs=True, top_p=0)
    assert sorted(alone.values())[-2:] == pytest.approx([-9999.0, 0.0], abs=1e-9)


def test_the_whole_vocabulary_is_listed_where_the_engine_allows_it() -> None:
    loaded = small_engine()
    with live_server(replace(loaded, info=replace(loaded.info, max_logprobs=-1))) as server:
        fields = {"prompt": "hello", "max_tokens": 1, "prompt_logprobs": -1, "echo": True}
        choice = server.post(PATH, **fields, logprobs=-1).json["choices"][0]
        assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 259, 259, 259, 259]
        assert sorted(e["rank"] for e in choice["prompt_logprobs"][1].values()) == list(range(1, 260))
        assert [len(entry or ()) for entry in choice["logprobs"]["top_logprobs"]] == [0] + [259] * 5
        # The whole distribution, but for the two numbers of the head that are no tokens.
        total = sum(math.exp(e["logprob"]) for e in choice["prompt_logprobs"][4].values())
        assert 0.9 < total < 1


def test_prompt_logprobs_can_be_asked_for_beside_an_echo(server: LiveServer) -> None:
    fields = {"prompt": ["ab", "cde"], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1, "n": 2}
    for index, choice in enumerate(server.post(PATH, **fields).json["choices"]):
        entries = choice["prompt_logprobs"]
        assert len(entries) == (2, 3)[index // 2]
        assert entries[0] is None
        assert all(3 <= len(entry) <= 4 for entry in entries[1:])
        assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])


def test_offsets_point_at_the_character_that_a_token_is_part_of() -> None:
    text = "aé😀<eos>z"
    with live_server(small_engine(ScriptedRunner(saying(4, "b世c")))) as server:
        tokens = byte_tokenizer().encode("é😀", add_special=False)[:4]
        choice = server.post(PATH, prompt=tokens, echo=True, logprobs=0).json["choices"][0]
        # The prompt ends inside a character.
        assert choice["logprobs"]["text_offset"][:4] == [0, 0, 1, 1]
        prompt = byte_tokenizer().encode(text, add_special=False)
        scored = server.post(PATH, prompt=text, echo=True, logprobs=0, max_tokens=0).json["choices"][0]
        assert len(prompt) == 1 + 2 + 4 + 1 + 1
        assert scored["text"] == text
        assert scored["logprobs"]["tokens"][-2:] == ["<eos>", "z"]
        assert scored["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 8]
        hidden = server.post(PATH, prompt=prompt, echo=True, logprobs=0, max_tokens=0).json["choices"][0]
        assert hidden["text"] == "aé😀z"
        assert hidden["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 3]
    with live_server(small_engine(ScriptedRunner(saying(2, "b世c!")))) as server:
        choice = server.post(PATH, prompt="hi", logprobs=0, stop=["c!"]).json["choices"][0]
        assert choice["text"] == "b世"
        # Tokens whose text was cut stand at its end.
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2]
        assert choice["stop_reason"] == "c!"


def test_a_truncated_prompt_is_the_one_that_is_counted_and_echoed(server: LiveServer) -> None:
    fields = {"truncate_prompt_tokens": 4, "echo": True, "max_tokens": 1, "logprobs": 0}
    answer = server.post(PATH, prompt="too long", **fields).json
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][0]["text"].startswith("long")
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5


def test_control_tokens_in_a_prompt_are_parsed_unless_told_otherwise(server: LiveServer) -> None:
    def prompt_ids(**fields: Any) -> list[int]:
        answer = server.post(PATH, prompt="a<eos>", max_tokens=1, return_token_ids=True, **fields).json
        result: list[int] = answer["choices"][0]["prompt_token_ids"]
        return result

    assert prompt_ids() == [97, EOS]
    assert prompt_ids(parse_special=False) == ids("a<eos>")
    assert prompt_ids(add_special_tokens=False) == [97, EOS]


def test_equal_answers_whatever_company_they_keep(server: LiveServer) -> None:
    prompts = [f"prompt {i} of several" for i in range(12)]
    fields = {"seed": 21, "max_tokens": 20, "logprobs": 1}
    together = server.post(PATH, prompt=prompts, **fields).json["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = server.post(PATH, prompt=prompt, **fields).json["choices"][0]
        assert {**alone, "index": choice["index"]} == choice


def test_null_is_the_same_as_absent(server: LiveServer) -> None:
    optional = (set(CompletionBody.model_fields) | set(UNSUPPORTED)) - {"prompt", "seed"}
    plain = server.post(PATH, prompt="hello", seed=2).json["choices"]
    assert server.post(PATH, prompt="hello", seed=2, **dict.fromkeys(optional)).json["choices"] == plain


def test_the_reference_client_streams_completions(server: LiveServer) -> None:
    client = server.client()
    whole = client.completions.create(model="small", prompt="hello", seed=2, max_tokens=9)
    stream = client.completions.create(model="small", prompt="hello", seed=2, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_tokens_and_text_go_there_and_back(server: LiveServer) -> None:
    reply = server.post("/tokenize", prompt="a<end>é", return_token_strs=True).json
    assert reply["tokens"] == [97, 258, *"é".encode()]
    assert (reply["count"], reply["max_model_len"]) == (4, 128)
    assert reply["token_strs"] == ["a", "<end>", "bytes:\\xc3", "bytes:\\xa9"]
    assert server.post("/detokenize", tokens=reply["tokens"]).json == {"prompt": "a<end>é"}
    assert server.post("/tokenize", prompt="<end>", parse_special=False).json["tokens"] == ids("<end>")
    messages = [{"role": "user", "content": "hi<end>"}]
    tokens = server.post("/tokenize", messages=messages).json["tokens"]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True).json
    assert tokens == answer["prompt_token_ids"]
