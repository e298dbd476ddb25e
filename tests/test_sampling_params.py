from __future__ import annotations

import math
from typing import Any

import pytest

from paceline import EarlyStop, SamplingParams
from paceline.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (0, 129, -1, 1.0, "2", True, None)],
        *[("temperature", v) for v in (-0.1, 2.1, math.nan, math.inf, -math.inf, "1", True, [], None)],
        *[("top_p", v) for v in (-0.1, 1.1, math.nan, "x", None)],
        *[("top_k", v) for v in (-2, 1.5, "5", True)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, None)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, math.inf, "0")],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)],
        *[("repetition_penalty", v) for v in (0, 0.0, -1, 1e-38, 9e-4, math.inf, math.nan)],
        *[("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "7", True)],
        *[("max_tokens", v) for v in (-1, 1.5, "9", True)],
        *[("min_tokens", v) for v in (-1, 17, None)],
        *[("stop", v) for v in ("", ["a", ""], ["x"] * 17, "x" * 257, [1], {"a": 1}, 5)],
        *[("stop_token_ids", v) for v in ([-1], [1.5], ["a"], [True], "12", 5, [1] * 1025, {1: 2}, [2**31])],
        *[("include_stop_str_in_output", v) for v in (1, "true", None)],
        *[("ignore_eos", v) for v in (0, "false", None)],
        *[("bad_words", v) for v in ("word", [""], [1], ["x"] * 257, ["x" * 257], 7)],
        *[
            ("logit_bias", v)
            for v in (
                [1],
                {1: 101},
                {1: -101},
                {1: math.nan},
                {"x": 1},
                {"5": 1, "05": 2},
                {5: 1, "5": 1},
                {1.5: 1},
                {1: "2"},
                {-1: 0},
            )
        ],
        *[("logit_bias", dict.fromkeys(range(1025), 0.0))],
        *[("allowed_token_ids", v) for v in ([], [-1], "1", [1.0])],
        *[("reasoning_max_tokens", v) for v in (-1, 1.5, "9", True)],
        *[("early_stop", v) for v in (True, 3, [1], {"window_size": 3})],
        *[("logprobs", v) for v in (-2, 1.0, "1", True)],
        *[("prompt_logprobs", v) for v in (-2, True)],
        *[("temp_scaled_logprobs", v) for v in (1, None)],
        *[("top_p_normalized_logprobs", v) for v in (0, "yes")],
        *[("skip_special_tokens", v) for v in (1, None)],
        *[("truncate_prompt_tokens", v) for v in (0, -1, 1.5)],
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "params",
    [
        {"n": 128, "temperature": 2, "top_p": 0, "top_k": -1, "min_p": 1.0, "seed": -(2**63)},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": 0},
        {"stop": ["x" * 256] * 16, "stop_token_ids": [0] * 1024, "bad_words": ["w"] * 256},
        {"stop": None, "bad_words": None, "logit_bias": None, "allowed_token_ids": None, "top_k": None},
        {"logprobs": -1, "prompt_logprobs": 0, "truncate_prompt_tokens": 1},
    ],
)
def test_the_limits_themselves_are_allowed(params: dict[str, Any]) -> None:
    SamplingParams(**params)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 0), ("window", 2**31), ("window", True), ("threshold", -0.1), ("threshold", 1.1),
     ("threshold", math.nan)],
)  # fmt: skip
def test_a_wrong_part_of_an_early_stop_is_refused_by_name(field: str, value: Any) -> None:
    for wrong in (lambda: EarlyStop(**{field: value}), lambda: SamplingParams(early_stop={field: value})):
        with pytest.raises(RequestError) as caught:
            wrong()
        assert caught.value.param == f"early_stop.{field}"


def test_an_early_stop_may_be_a_dictionary_and_has_defaults() -> None:
    assert SamplingParams(early_stop={"window": 5}).early_stop == EarlyStop(5, 0.99)
    assert SamplingParams(early_stop={"threshold": 1, "window": None}).early_stop == EarlyStop(3000, 1)
    assert SamplingParams(early_stop={}).early_stop == SamplingParams(early_stop=EarlyStop()).early_stop
    assert SamplingParams(early_stop=None).early_stop is None


def test_a_bias_may_come_with_the_keys_that_json_has() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: -2.5}).logit_bias == {5: 1.0, 6: -2.5}


def test_parameters_do_not_change_once_they_are_made() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops, stop_token_ids=[1])
    stops.append("b")
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]
