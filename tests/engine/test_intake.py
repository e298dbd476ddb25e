from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from paceline.engine.intake import Intake, accept
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams
from paceline.text.parts import TokenCoding, TokenizerParts
from paceline.text.thinking import ThinkingTags
from paceline.text.tokenizer import Tokenizer
from paceline.types import LogprobsMode, ThinkingBudget
from support.random_model import CONTEXT
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import END, EOS, small_engine

INFO = small_engine(ScriptedRunner(saying(0, ""))).info


def taken(prompt: Any = (1, 2, 3), *, cache_salt: str | None = None, seed: int = 0, **params: Any) -> Intake:
    return accept(
        INFO, prompt, SamplingParams(**params), request_id="r", seed_source=random.Random(seed), cache_salt=cache_salt
    )


def test_defaults_become_rules() -> None:
    (request,) = taken().requests
    assert request.tokens == [1, 2, 3]
    assert request.rules.eos_token_ids == (EOS,)
    assert (request.rules.temperature, request.rules.top_k, request.rules.max_tokens) == (1.0, 0, 16)


def test_ignore_eos_leaves_no_end_tokens() -> None:
    assert taken(ignore_eos=True).requests[0].rules.eos_token_ids == ()


@pytest.mark.parametrize("temperature", [0, 1e-6, 9.9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert taken(temperature=temperature).requests[0].rules.temperature == 0.0


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_top_k_has_three_ways_of_being_off(top_k: int | None) -> None:
    assert taken(top_k=top_k).requests[0].rules.top_k == 0


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    requests = taken(n=4, seed=123).requests
    plain = taken(n=4, **{"seed": 123}).requests
    assert [r.rules.seed for r in requests] == [r.rules.seed for r in plain]
    assert len({r.rules.seed for r in requests}) == 4
    assert len({r.request_id for r in requests}) == 4


def test_a_given_seed_is_used_as_it_is() -> None:
    intake = accept(INFO, (1,), SamplingParams(seed=-5, n=2), request_id="r", seed_source=random.Random(0))
    assert intake.requests[0].rules.seed == 2**64 - 5


def test_requests_without_a_seed_draw_different_ones() -> None:
    source = random.Random(1)
    drawn = {
        accept(INFO, (1,), SamplingParams(), request_id="r", seed_source=source).requests[0].rules.seed
        for _ in range(20)
    }
    assert len(drawn) == 20


def test_max_tokens_is_clamped_to_the_room_left() -> None:
    prompt = [1] * (CONTEXT - 10)
    assert taken(prompt, max_tokens=500).requests[0].rules.max_tokens == 10
    assert taken(prompt, max_tokens=None).requests[0].rules.max_tokens == 10
    assert taken(prompt, max_tokens=500, min_tokens=400).requests[0].rules.min_tokens == 10


def test_a_prompt_that_fills_the_context_can_only_be_scored() -> None:
    prompt = [1] * CONTEXT
    assert taken(prompt, max_tokens=0).requests[0].rules.max_tokens == 0
    with pytest.raises(RequestError, match=f"{CONTEXT} tokens and 1 tokens .* holds {CONTEXT}"):
        taken(prompt, max_tokens=1)
    with pytest.raises(RequestError, match="the context holds"):
        taken([*prompt, 1], max_tokens=0)


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    assert taken((1, 2, 3, 4), truncate_prompt_tokens=2).requests[0].tokens == [3, 4]
    assert taken([1] * 1000, truncate_prompt_tokens=9).prompt_token_ids == [1] * 9


def test_the_name_of_a_control_token_is_a_stop_id() -> None:
    intake = taken(stop=["<end>", "plain"])
    assert intake.requests[0].rules.stop_token_ids == (END,)
    assert intake.stop_names == {END: "<end>"}


def test_bad_words_come_with_and_without_a_space() -> None:
    assert set(taken(bad_words=["hi"]).requests[0].rules.bad_words) == {tuple(b"hi"), tuple(b" hi")}


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [1, 259]}, "prompt", "259; the model has ids 0 to 258"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [True]}, "prompt", "integers"),
        ({"prompt": [1.0]}, "prompt", "integers"),
        ({"prompt": ["a"]}, "prompt", "integers"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "300"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids", "300"),
        ({"logit_bias": {300: 1.0}}, "logit_bias", "300"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": -1}, "logprobs", "max_logprobs -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids", "forbid"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", "forbid"),
        (
            {"allowed_token_ids": [END, 97], "min_tokens": 1, "stop": ["<end>"], "bad_words": ["a"]},
            "allowed_token_ids",
            "forbid",
        ),
        ({"reasoning_max_tokens": 5}, "reasoning_max_tokens", "small is not known to"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(params: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        taken(**params)
    assert caught.value.param == field


def test_bad_words_must_leave_a_token_of_the_model() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "\u0120": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = TokenizerParts(
        backend, TokenCoding.BYTE_LEVEL, strips_space=False, vocab_size=3, bos_id=None, eos_ids=(), unk_id=None,
        prefix=(), suffix=(),
    )  # fmt: skip
    info = replace(INFO, tokenizer=Tokenizer(parts), eos_token_ids=())

    def ask(*bad_words: str) -> None:
        accept(info, (0,), SamplingParams(bad_words=bad_words), request_id="r", seed_source=random.Random(0))

    ask("a", "b")
    with pytest.raises(RequestError, match="every token of the model") as caught:
        ask("a", "b", " ")
    assert caught.value.param == "bad_words"


def test_a_thinking_budget_comes_with_the_tags_of_the_model() -> None:
    info = replace(INFO, thinking=ThinkingTags((1,), (2, 3), (4, 2, 3)))
    for limit in (0, 7):
        params = SamplingParams(reasoning_max_tokens=limit)
        (request,) = accept(info, (1,), params, request_id="r", seed_source=random.Random(0)).requests
        assert request.rules.thinking == ThinkingBudget(limit, (1,), (2, 3), (4, 2, 3))
    (request,) = accept(info, (1,), SamplingParams(), request_id="r", seed_source=random.Random(0)).requests
    assert request.rules.thinking is None


def test_an_early_stop_is_two_numbers() -> None:
    (request,) = taken(early_stop={"window": 4, "threshold": 0.9}).requests
    assert (request.rules.early_stop_window, request.rules.early_stop_threshold) == (4, 0.9)
    assert taken().requests[0].rules.early_stop_window == 0


def test_the_whole_vocabulary_may_be_asked_for_where_that_is_allowed() -> None:
    info = replace(INFO, max_logprobs=-1)
    intake = accept(info, (1,), SamplingParams(logprobs=-1), request_id="r", seed_source=random.Random(0))
    assert intake.requests[0].rules.logprobs == -1


@pytest.mark.parametrize("mode", [LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS])
@pytest.mark.parametrize("field", ["temp_scaled_logprobs", "top_p_normalized_logprobs"])
def test_logits_are_not_normalised(mode: LogprobsMode, field: str) -> None:
    info = replace(INFO, logprobs_mode=mode)
    plain = accept(info, (1,), SamplingParams(logprobs=1), request_id="r", seed_source=random.Random(0))
    assert plain.requests[0].rules.logprobs_mode is mode
    params = SamplingParams(logprobs=1, **{field: True})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{field} needs log-probabilities.*{mode.value}") as caught:
        accept(info, (1,), params, request_id="r", seed_source=random.Random(0))
    assert caught.value.param == field


def test_the_listed_logprobs_of_a_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.intake.MAX_PROMPT_LOGPROBS", 600)
    info = replace(INFO, max_logprobs=-1)

    def ask(num_prompt: int, **params: int) -> None:
        accept(info, [1] * num_prompt, SamplingParams(**params), request_id="r", seed_source=random.Random(0))

    ask(2, prompt_logprobs=-1)
    ask(100, prompt_logprobs=6)
    with pytest.raises(RequestError, match="259 tokens at each of 3 positions, but 600"):
        ask(3, prompt_logprobs=-1)
    with pytest.raises(RequestError, match="7 tokens at each of 100 positions"):
        ask(100, prompt_logprobs=7)
