"""From what a caller asks to sequences for the scheduler: every check that depends on the model happens here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.engine.model_info import ModelInfo
from paceline.errors import RequestError
from paceline.ops.noise import fold_choice
from paceline.sampling_params import EarlyStop, SamplingParams
from paceline.text.answer_parser import Thinking
from paceline.text.tokenizer import bad_word_ids
from paceline.types import LogprobsMode, ThinkingBudget, TokenRules

MAX_PROMPT_LOGPROBS = 10_000_000
"""Log-probabilities listed for one prompt, at most: they are kept until the answer is complete."""


@dataclass(frozen=True, slots=True)
class Intake:
    """One accepted prompt: its sequences (one for each choice), and what the text side has to know.

    ``stop_strings`` are searched in the text. ``stop_names`` gives the string behind a stop id, for strings that name a
    special token: such a token has no text to search in. ``shown_ids`` are special tokens that have a text.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[Request]
    stop_strings: tuple[str, ...]
    stop_names: dict[int, str]
    shown_ids: frozenset[int] = frozenset()


def accept(
    info: ModelInfo,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    seed_source: random.Random,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
    thinking: Thinking = Thinking.OFF,
    shown_ids: frozenset[int] = frozenset(),
) -> Intake:
    """Check a prompt and its parameters against the model. Raises RequestError naming the field and the limit.

    Choice j is the sequence ``{request_id}-{j}``; its seed is the request's, with j folded in. ``adapter`` is the name
    of one of the model's. With ``thinking`` a grammar begins after it. ``shown_ids`` are special tokens that are text
    all the same.
    """
    tokens = check_token_ids("prompt", prompt_token_ids, info)
    if params.truncate_prompt_tokens is not None:
        tokens = tokens[-params.truncate_prompt_tokens :]
    if not tokens:
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    if cache_salt is not None and not cache_salt:
        raise RequestError("cache_salt must not be empty", "cache_salt")
    if adapter is not None and (not isinstance(adapter, str) or adapter not in info.adapters):
        known = f"there is {', '.join(info.adapters)}" if info.adapters else "there is none"
        raise RequestError(f"no adapter has the name {adapter!r:.100}; {known}", "lora_request")
    max_tokens = _room(info, len(tokens), params)
    _check_logprobs(params, len(tokens), info)
    stop_strings, stop_names = _split_stops(params, info)
    eos = () if params.ignore_eos else info.eos_token_ids
    stop_ids = check_token_ids("stop_token_ids", params.stop_token_ids or (), info)
    allowed = params.allowed_token_ids
    if allowed is not None:
        check_token_ids("allowed_token_ids", allowed, info)
        allowed = tuple(sorted(set(allowed)))
    budget = _thinking_budget(info, params)
    early_stop = params.early_stop
    assert early_stop is None or isinstance(early_stop, EarlyStop)
    bias = params.logit_bias or {}
    check_token_ids("logit_bias", tuple(bias), info)
    bad_words = bad_word_ids(info.tokenizer, params.bad_words or ())
    ends = {*eos, *stop_ids, *stop_names} if params.min_tokens else set()
    _check_candidates(allowed, {word[0] for word in bad_words if len(word) == 1} | ends, info)
    grammar = None if params.structured_outputs is None else info.grammars.compile(params.structured_outputs)
    grammar_after, grammar_opener = ((), None) if grammar is None else _thinking_tokens(info, thinking)
    seed = seed_source.getrandbits(64) if params.seed is None else params.seed % 2**64
    requests = []
    for index in range(params.n):
        rules = TokenRules(
            temperature=0.0 if params.greedy else float(params.temperature),
            top_k=max(params.top_k or 0, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            seed=fold_choice(seed, index),
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            eos_token_ids=eos,
            stop_token_ids=tuple(sorted({*stop_ids, *stop_names})),
            bad_words=bad_words,
            logit_bias=tuple(sorted(bias.items())),
            allowed_token_ids=allowed,
            thinking=budget,
            early_stop_window=0 if early_stop is None else early_stop.window,
            early_stop_threshold=1.0 if early_stop is None else float(early_stop.threshold),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            grammar=grammar,
            grammar_after=grammar_after,
            grammar_opener=grammar_opener,
            logprobs_mode=info.logprobs_mode,
            temp_scaled_logprobs=params.temp_scaled_logprobs,
            top_p_normalized_logprobs=params.top_p_normalized_logprobs,
        )
        name = choice_id(request_id, index)
        requests.append(Request(name, list(tokens), rules, priority, cache_salt or "", adapter))
    return Intake(request_id, tokens, params, requests, stop_strings, stop_names, shown_ids)


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}"


def check_token_ids(field: str, ids: Sequence[int], info: ModelInfo) -> list[int]:
    """The ids as a list. Raises RequestError for anything that is not a token of the model."""
    limit = info.tokenizer.vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(f"{field} must hold token ids (integers), not {type(token).__name__}", field)
        if not 0 <= token < limit:
            raise RequestError(f"{field} holds the token id {token}; the model has ids 0 to {limit - 1}", field)
    return list(ids)


def _room(info: ModelInfo, num_prompt: int, params: SamplingParams) -> int:
    """Output tokens this request may have: what it asks for, clamped to what the context leaves."""
    # A prompt that fills the context can still be scored.
    longest = info.max_model_len - (0 if params.max_tokens == 0 else 1)
    if num_prompt > longest:
        asked = "the rest of the context" if params.max_tokens is None else f"{params.max_tokens} tokens"
        raise RequestError(
            f"the prompt has {num_prompt} tokens and {asked} of output were asked for, "
            f"but the context holds {info.max_model_len} tokens",
            "prompt",
        )
    room = info.max_model_len - num_prompt
    return room if params.max_tokens is None else min(params.max_tokens, room)


def _check_logprobs(params: SamplingParams, num_prompt: int, info: ModelInfo) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is None or info.max_logprobs == -1:
            continue
        if value == -1:
            raise RequestError(f"{field} -1, the whole vocabulary, needs an engine with max_logprobs -1", field)
        if value > info.max_logprobs:
            raise RequestError(f"{field} must be at most {info.max_logprobs} (max_logprobs), not {value}", field)
    if params.prompt_logprobs is not None:
        listed = info.tokenizer.vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
        if num_prompt * listed > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs lists {listed} tokens at each of {num_prompt} positions, "
                f"but {MAX_PROMPT_LOGPROBS} together at most",
                "prompt_logprobs",
            )
    if info.logprobs_mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS):
        for field in ("temp_scaled_logprobs", "top_p_normalized_logprobs"):
            if getattr(params, field):
                raise RequestError(
                    f"{field} needs log-probabilities, but this engine reports logits "
                    f"(logprobs_mode is {info.logprobs_mode})",
                    field,
                )


def _thinking_budget(info: ModelInfo, params: SamplingParams) -> ThinkingBudget | None:
    limit, tags = params.reasoning_max_tokens, info.thinking
    if limit is None:
        return None
    if tags is None:
        raise RequestError(
            f"reasoning_max_tokens needs a model that thinks, and {info.name} is not known to "
            "(thinking_start and thinking_end tell how a model does)",
            "reasoning_max_tokens",
        )
    return ThinkingBudget(limit, tags.start, tags.end, tags.close)


def _thinking_tokens(info: ModelInfo, thinking: Thinking) -> tuple[tuple[int, ...], int | None]:
    """The tokens that end the thinking, and the one that opens it if it is not open yet; none if there is none."""
    if info.formats.reasoning is None or thinking is Thinking.OFF:
        return (), None
    begin, end = info.formats.think_begin, info.formats.think_end
    if thinking is Thinking.OPEN:
        return end, None
    # A grammar can wait for one token only; a model that spells the tag in several answers at once.
    return (end, begin[0]) if len(begin) == 1 else ((), None)


def _split_stops(params: SamplingParams, info: ModelInfo) -> tuple[tuple[str, ...], dict[int, str]]:
    """Stop strings to search in the text, and those that are the name of one special token."""
    strings, names = [], {}
    for stop in params.stop or ():
        ids = info.tokenizer.encode(stop, add_special=False, parse_special=True)
        if len(ids) == 1 and ids[0] in info.tokenizer.special_ids:
            names[ids[0]] = stop
        strings.append(stop)
    return tuple(strings), names


def _check_candidates(allowed: tuple[int, ...] | None, banned: set[int], info: ModelInfo) -> None:
    if allowed is not None and set(allowed) <= banned:
        raise RequestError("bad_words and min_tokens forbid every one of allowed_token_ids", "allowed_token_ids")
    if len(banned) >= info.tokenizer.vocab_size:
        raise RequestError("bad_words and min_tokens forbid every token of the model", "bad_words")
