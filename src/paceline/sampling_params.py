"""What a caller may ask of the choice of tokens, checked once, in front of everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.structured_outputs import StructuredOutputs

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LISTED_IDS = 1024
MAX_BAD_WORDS = 256
MIN_REPETITION_PENALTY = 1e-3
"""Dividing by less would carry ordinary logits out of float32."""
SWITCHES = (
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "temp_scaled_logprobs",
    "top_p_normalized_logprobs",
)  # fmt: skip
MAX_EARLY_STOP_WINDOW = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only amplify rounding."""


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """End a sequence that is sure of every token, as one that repeats itself is.

    Attributes:
        window: the last so many tokens must all have been likely, 1 or more.
        threshold: a token is likely if its probability, when it was chosen, was above this, 0..1.
    """

    window: int = 3000
    threshold: float = 0.99

    def __post_init__(self) -> None:
        _integer("early_stop.window", self.window, 1, MAX_EARLY_STOP_WINDOW)
        _number("early_stop.threshold", self.threshold, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Immutable and validated on construction: a wrong type or value raises :class:`RequestError` naming the field.
    Limits that depend on the model (context length, vocabulary, ``--max-logprobs``) are checked on submission.

    Attributes:
        n: choices to generate for each prompt, 1..128. Choice 0 of a seeded request uses the seed itself.
        temperature: 0..2; 0 (and anything below 1e-5) is greedy.
        top_p: 0..1; the smallest set of tokens whose mass before each token is at most this. 0 keeps the best token.
        top_k: keep the k most likely tokens; 0, -1 and None are off.
        min_p: 0..1; drop tokens less likely than this share of the likeliest one's probability.
        presence_penalty: -2..2, taken once from tokens present in the output.
        frequency_penalty: -2..2, taken for each occurrence in the output.
        repetition_penalty: at least 0.001; divides positive and multiplies negative logits of tokens in prompt or
            output.
        seed: 64-bit integer; None draws one when the request is admitted.
        max_tokens: output tokens at most; None means the rest of the context. 0 only scores the prompt.
        min_tokens: end-of-sequence, stop ids and stop strings cannot end the output before this many tokens.
        stop: strings that end the output, at most 16 of at most 256 characters.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at the model's own end-of-sequence tokens.
        bad_words: words never generated, with and without a leading space.
        logit_bias: token id to a value in -100..100 added to its logit.
        allowed_token_ids: if given, only these ids can be chosen.
        reasoning_max_tokens: end the model's thinking after this many tokens; 0 does not let it begin. None is off.
        early_stop: :class:`EarlyStop`, or its fields in a dictionary; the stop reason is then "repetition".
        logprobs: if given, log-probabilities of the chosen token and of this many likeliest ones; -1 is all.
        prompt_logprobs: the same for the prompt's tokens.
        temp_scaled_logprobs: log-probabilities of the output are those of the logits divided by the temperature,
            unless that is 0. Processed ones are in any case.
        top_p_normalized_logprobs: log-probabilities of the output are those within the top-p set; a token outside of
            it has -9999. Its rank remains that among all tokens.
        skip_special_tokens: leave special tokens out of the text.
        truncate_prompt_tokens: keep only this many tokens from the end of the prompt.
        structured_outputs: what the text has to be, for instance JSON of a schema; None is off. A chat's answer keeps
            to it after the thinking.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    reasoning_max_tokens: int | None = None
    early_stop: EarlyStop | Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, None)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_LISTED_IDS))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids, None))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.reasoning_max_tokens is not None:
            _integer("reasoning_max_tokens", self.reasoning_max_tokens, 0, None)
        object.__setattr__(self, "early_stop", _early_stop(self.early_stop))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, -1, None)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError("structured_outputs must be StructuredOutputs", "structured_outputs")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _integer(name: str, value: object, low: int | None, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, not {_show(value)}", name)
    _range(name, value, low, high)


def _number(name: str, value: object, low: float | None, high: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, not {_show(value)}", name)
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        finite = False
    if not finite:
        raise RequestError(f"{name} must be finite", name)
    _range(name, value, low, high)


def _range(name: str, value: float, low: float | None, high: float | None) -> None:
    if low is not None and not value >= low:
        raise RequestError(f"{name} must be at least {low}, not {_show(value)}", name)
    if high is not None and not value <= high:
        raise RequestError(f"{name} must be at most {high}, not {_show(value)}", name)


def _ids(name: str, value: object, limit: int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids", name)
    if limit is not None and len(value) > limit:
        raise RequestError(f"{name} takes at most {limit} ids, not {len(value)}", name)
    for item in value:
        _integer(name, item, 0, 2**31 - 1)
    return tuple(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if isinstance(items, Mapping) or not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise RequestError("stop must be a string or a list of strings", "stop")
    if len(items) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(items)}", "stop")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, not {len(item)}", "stop"
            )
    return tuple(items)


def _bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise RequestError("bad_words must be a list of strings", "bad_words")
    if len(value) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words takes at most {MAX_BAD_WORDS} words, not {len(value)}", "bad_words")
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"each of bad_words must be a string of 1 to {MAX_STOP_STRING_CHARS} characters", "bad_words"
            )
    return tuple(value)


def _logit_bias(value: object) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
    if len(value) > MAX_LISTED_IDS:
        raise RequestError(f"logit_bias takes at most {MAX_LISTED_IDS} ids, not {len(value)}", "logit_bias")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        _integer("logit_bias", token, 0, 2**31 - 1)
        if token in bias:
            raise RequestError(f"logit_bias names the token {token} twice", "logit_bias")
        _number("logit_bias", number, -100.0, 100.0)
        bias[token] = float(number)
    return bias


def _early_stop(value: object) -> EarlyStop | None:
    if value is None or isinstance(value, EarlyStop):
        return value
    if not isinstance(value, Mapping) or not set(value) <= {"window", "threshold"}:
        raise RequestError("early_stop must be an object with window and threshold", "early_stop")
    return EarlyStop(**{name: number for name, number in value.items() if number is not None})


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
