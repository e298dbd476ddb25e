from __future__ import annotations

from typing import Any

import pytest

from paceline.config import CHOICES, LIMITS, EngineConfig, parse_bool
from paceline.errors import ConfigError
from paceline.types import LogprobsMode


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_allowed_and_what_lies_beyond_is_refused_by_name(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high):
        EngineConfig("m", **{name: value})
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=name):
            EngineConfig("m", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", None), ("max_num_seqs", 1.0), ("max_num_seqs", True), ("max_num_seqs", "4"),
        ("memory_utilization", "x"), ("memory_utilization", True), ("memory_utilization", float("nan")),
        ("queue_timeout", "x"), ("enable_prefix_caching", "x"), ("enable_prefix_caching", 1), ("seed", 1.5),
        ("seed", "x"), ("tokenizer", 5), ("chat_template", 5), ("ops", None), ("max_logprobs", None),
        ("lora", "a=b"), ("lora", ["a"]), ("lora", {"a": 5}), ("lora", {5: "a"}), ("lora", {"": "a"}),
        ("lora", {"a": ""}),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig("m", **{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_is_allowed_and_nothing_else(name: str) -> None:
    for value in CHOICES[name]:
        EngineConfig("m", **{name: value})
    with pytest.raises(ConfigError, match=f"{name} must be one of {CHOICES[name][0]}"):
        EngineConfig("m", **{name: "other"})


def test_every_mode_of_logprobs_can_be_set() -> None:
    assert CHOICES["logprobs_mode"] == tuple(LogprobsMode)


def test_the_model_is_a_name() -> None:
    for wrong in (None, 5):
        with pytest.raises(ConfigError, match="model"):
            EngineConfig(wrong)  # type: ignore[arg-type]


def test_adapters_are_folders_by_name() -> None:
    assert EngineConfig("m", lora={"a": "b"}).lora == {"a": "b"}
    with pytest.raises(ConfigError, match="lora must be Mapping or None"):
        EngineConfig("m", lora=5)  # type: ignore[arg-type]


def test_whole_numbers_do_for_fractions() -> None:
    assert EngineConfig("m", queue_timeout=3, memory_utilization=1).queue_timeout == 3


@pytest.mark.parametrize(("text", "value"), [("1", True), ("On", True), ("no", False), ("", False), (" FALSE ", False)])
def test_booleans_have_many_spellings(text: str, value: bool) -> None:
    assert parse_bool(text) is value


def test_what_is_no_boolean_is_refused() -> None:
    with pytest.raises(ConfigError, match="maybe"):
        parse_bool("maybe")
