"""The choice of one token as its definition reads: one row, plain Python, float64, everything sorted in full."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.ops.noise import gumbel
from paceline.types import ThinkingBudget, TokenRules


def edited_logits(
    logits: Sequence[float], rules: TokenRules, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> list[float]:
    """The logits after everything that ``rules`` does to them."""
    if rules.thinking is not None:
        _, forced = thinking_at(rules.thinking, prompt, output)
        if forced is not None:
            return [z if token == forced else -math.inf for token, z in enumerate(logits)]
    edited = []
    bias = dict(rules.logit_bias)
    for token, logit in enumerate(logits):
        z = logit + bias.get(token, 0.0)
        count = list(output).count(token)
        if token in prompt or count:
            z = z * rules.repetition_penalty if z < 0 else z / rules.repetition_penalty
        if count:
            z -= count * rules.frequency_penalty + rules.presence_penalty
        forbidden = (
            token >= vocab_size
            or (rules.allowed_token_ids is not None and token not in rules.allowed_token_ids)
            or (len(output) < rules.min_tokens and token in rules.eos_token_ids + rules.stop_token_ids)
            or any(_completes(word, token, output) for word in rules.bad_words)
        )
        edited.append(-math.inf if forbidden else z)
    return edited


def _completes(word: Sequence[int], token: int, output: Sequence[int]) -> bool:
    before = len(word) - 1
    return word[-1] == token and len(output) >= before and list(output[len(output) - before :]) == list(word[:-1])


def thinking_at(budget: ThinkingBudget, prompt: Sequence[int], output: Sequence[int]) -> tuple[bool, int | None]:
    """Whether the sequence is thinking, and the token that has to come next. The output has kept to the rules so far.

    Told from the whole of the tokens: where the block begins, where it ends by itself, and how far it is beyond its
    limit.
    """
    tokens = [*prompt, *output]

    def ends_at(position: int, sequence: Sequence[int]) -> bool:
        return tokens[max(position - len(sequence), 0) : position] == list(sequence)

    begin: int | None = None
    for position in range(1, len(prompt) + 1):
        if begin is None and ends_at(position, budget.start):
            begin = position
        elif begin is not None and ends_at(position, budget.end):
            begin = None
    if begin is not None:
        begin = len(prompt)
    else:
        begin = next((p for p in range(len(prompt) + 1, len(tokens) + 1) if ends_at(p, budget.start)), None)
    if begin is None:
        return False, None
    limit = begin + budget.limit
    if any(ends_at(position, budget.end) for position in range(begin + 1, min(limit, len(tokens)) + 1)):
        return False, None
    if len(tokens) < limit:
        return True, None
    closed = tokens[limit:]
    if len(closed) >= len(budget.close):
        return False, None
    return True, budget.close[len(closed)]


def settled(token: int, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> int:
    """What stands in the place of a chosen token."""
    if rules.thinking is None or token not in rules.eos_token_ids:
        return token
    thinking, forced = thinking_at(rules.thinking, prompt, output)
    if not thinking or forced is not None:
        return token
    tokens, end = [*prompt, *output], list(rules.thinking.end)
    return next(end[n] for n in reversed(range(len(end))) if n == 0 or tokens[-n:] == end[:n])


def as_thinking_allows(rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The output of a sequence that would like to say ``output``."""
    result: list[int] = []
    for token in output:
        forced = None if rules.thinking is None else thinking_at(rules.thinking, prompt, result)[1]
        result.append(settled(token, rules, prompt, result) if forced is None else forced)
    return result


def kept_tokens(
    logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """The tokens that can be chosen, with their probabilities, which sum to 1."""
    peak = max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = [math.exp((z - peak) / temperature) for z in logits]
    total = math.fsum(weight)
    if min_p > 0:
        order = [token for token in order if logits[token] > -math.inf]
        order = [token for token in order if (logits[token] - peak) / temperature >= math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
        total = math.fsum(weight[token] for token in order)
    if top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            if mass > top_p * total:
                break
            kept.append(token)
            mass += weight[token]
        order = kept
    rest = math.fsum(weight[token] for token in order)
    return {token: weight[token] / rest for token in order if weight[token] > 0}


def logprobs_of(
    logits: Sequence[float], rules: TokenRules, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> list[float]:
    """The number reported for each token of the head, minus infinity included, in the form that the rules ask for."""
    processed = rules.logprobs_mode.startswith("processed")
    z = edited_logits(logits, rules, prompt, output, vocab_size) if processed else list(logits)
    if rules.temperature > 0 and (processed or rules.temp_scaled_logprobs):
        z = [value / rules.temperature for value in z]
    if rules.logprobs_mode.endswith("logits"):
        return z
    if rules.top_p_normalized_logprobs and rules.top_p < 1:
        kept = kept_tokens(z[:vocab_size], top_p=rules.top_p)
        return [math.log(kept[token]) if token in kept else -math.inf for token in range(len(z))]
    peak = max(z)
    log_sum = peak + math.log(math.fsum(math.exp(value - peak) for value in z))
    return [value - log_sum for value in z]


def probability(edited: Sequence[float], token: int, temperature: float) -> float:
    """Of a token, before min-p, top-k and top-p."""
    z = [value / (temperature or 1.0) for value in edited]
    peak = max(z)
    return math.exp(z[token] - peak) / math.fsum(math.exp(value - peak) for value in z)


def scores(
    logits: Sequence[float], kept: Sequence[int], temperature: float, seed: int, position: int
) -> dict[int, float]:
    """What each kept token enters the final comparison with."""
    peak = max(logits)
    ids = np.array(kept)
    noise = gumbel(seed, position, ids)
    return {token: (logits[token] - peak) / temperature + float(g) for token, g in zip(kept, noise, strict=True)}
