"""The choice of one token as its definition reads: one row, plain Python, float64, everything sorted in full."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.ops.noise import gumbel
from paceline.types import TokenRules


def edited_logits(
    logits: Sequence[float], rules: TokenRules, prompt: Sequence[int], output: Sequence[int], vocab_size: int
) -> list[float]:
    """The logits after everything that ``rules`` does to them."""
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


def scores(
    logits: Sequence[float], kept: Sequence[int], temperature: float, seed: int, position: int
) -> dict[int, float]:
    """What each kept token enters the final comparison with."""
    peak = max(logits)
    ids = np.array(kept)
    noise = gumbel(seed, position, ids)
    return {token: (logits[token] - peak) / temperature + float(g) for token, g in zip(kept, noise, strict=True)}
