"""Log-probabilities as callers see them: finite numbers, and tokens of the tokenizer only."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from paceline.ops.api import Ops
from paceline.tensors import FloatArray, IntArray
from paceline.types import LogprobsMode, TokenLogprobs, TokenRules

LOWEST = -9999.0
"""Stands for a probability of zero, which JSON cannot write as a logarithm; OpenAI's API uses the same number."""

NOT_FINITE = "the logits are not finite"


@dataclass(frozen=True, slots=True)
class LogprobsForm:
    """The log-probabilities that a sequence wants of the tokens it chooses.

    Attributes:
        k: likeliest tokens beside the chosen one; -1 is the vocabulary.
        processed: those of the logits after the edits, else before them.
        as_logits: the logits themselves.
        temperature: the logits are divided by it.
        top_p: the probability is shared among the tokens of this top-p set alone; 1 is off.
    """

    k: int
    processed: bool = False
    as_logits: bool = False
    temperature: float = 1.0
    top_p: float = 1.0


def logprobs_form(rules: TokenRules) -> LogprobsForm | None:
    """The form that the rules ask for; None if they ask for no log-probabilities."""
    if rules.logprobs is None:
        return None
    processed = rules.logprobs_mode in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)
    scaled = (processed or rules.temp_scaled_logprobs) and rules.temperature > 0
    return LogprobsForm(
        k=rules.logprobs,
        processed=processed,
        as_logits=reports_logits(rules),
        temperature=rules.temperature if scaled else 1.0,
        top_p=rules.top_p if rules.top_p_normalized_logprobs else 1.0,
    )


def reports_logits(rules: TokenRules) -> bool:
    return rules.logprobs_mode in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


def formed_logprobs(
    ops: Ops, logits: FloatArray, tokens: IntArray, forms: Sequence[LogprobsForm], vocab_size: int
) -> list[TokenLogprobs | None]:
    """:func:`token_logprobs`, each row in a form of its own. The logits [R, V] are used up."""
    for row, form in enumerate(forms):
        if form.temperature != 1:
            divide(logits[row], form.temperature)
        if form.top_p < 1:
            logits[row, vocab_size:] = -np.inf  # the set is one of tokens
    results: list[TokenLogprobs | None] = [None] * len(forms)
    for k in dict.fromkeys(form.k for form in forms):
        rows = [row for row, form in enumerate(forms) if form.k == k]
        part = logits if len(rows) == len(forms) else logits[rows]
        for row, entry in zip(rows, token_logprobs(ops, part, tokens[rows], k, vocab_size), strict=True):
            results[row] = entry
    for row, (form, entry) in enumerate(zip(forms, results, strict=True)):
        if entry is not None and form.as_logits:
            results[row] = _as_logits(entry, logits[row])
        elif entry is not None and form.top_p < 1:
            results[row] = _within_top_p(ops, entry, logits[row : row + 1], form.top_p)
    return results


def divide(row: FloatArray, temperature: float) -> None:
    """In place; what leaves the range of float32 becomes infinite, and is found later."""
    with np.errstate(over="ignore"):
        row /= np.float32(temperature)


def token_logprobs(
    ops: Ops, logits: FloatArray, tokens: IntArray, k: int, vocab_size: int
) -> list[TokenLogprobs | None]:
    """The log-probabilities of ``tokens`` [R] and of the ``k`` likeliest in logits [R, V]; k = -1 is the vocabulary.

    They are normalised over all V outputs of the head, as everybody computes them; but outputs at or above
    ``vocab_size`` are no tokens, so they are neither listed nor counted in a rank. No value is below
    :data:`LOWEST`. A row whose logits contain NaN or plus infinity, or nothing finite, has None.
    """
    if not len(tokens):
        return []
    padding = logits[:, vocab_size:]
    listed = vocab_size if k == -1 else min(k, vocab_size)
    # Among so many at least ``listed`` are tokens, wherever the head's padding lands.
    found = ops.top_logprobs(logits, tokens, listed + padding.shape[1])
    above = np.count_nonzero(padding >= logits[np.arange(len(tokens)), tokens][:, None], axis=1)
    results: list[TokenLogprobs | None] = []
    for row, token in enumerate(tokens.tolist()):
        chosen = float(found.chosen[row])
        if math.isnan(chosen):
            results.append(None)
            continue
        are_tokens = found.top_ids[row] < vocab_size
        top_values = np.maximum(found.top_values[row][are_tokens][:listed], LOWEST)
        results.append(
            TokenLogprobs(
                token_id=token,
                logprob=max(chosen, LOWEST),
                rank=int(found.ranks[row] - above[row]),
                top_ids=tuple(found.top_ids[row][are_tokens][:listed].tolist()),
                top_logprobs=tuple(top_values.tolist()),
            )
        )
    return results


def prompt_logprobs(
    ops: Ops, logits: FloatArray, targets: IntArray, k: int, vocab_size: int, *, as_logits: bool = False
) -> list[TokenLogprobs]:
    """:func:`token_logprobs` of the prompt tokens [R] that follow the rows. Raises ArithmeticError for a bad row."""
    results: list[TokenLogprobs] = []
    for row, result in enumerate(token_logprobs(ops, logits, targets, k, vocab_size)):
        if result is None:
            raise ArithmeticError(NOT_FINITE)
        results.append(_as_logits(result, logits[row]) if as_logits else result)
    return results


def _as_logits(entry: TokenLogprobs, row: FloatArray) -> TokenLogprobs:
    """The same tokens with their logits from ``row`` [V]."""
    top = np.maximum(row[list(entry.top_ids)], LOWEST) if entry.top_ids else row[:0]
    return replace(entry, logprob=max(float(row[entry.token_id]), LOWEST), top_logprobs=tuple(top.tolist()))


def _within_top_p(ops: Ops, entry: TokenLogprobs, logits: FloatArray, top_p: float) -> TokenLogprobs:
    """The same tokens with their log-probabilities within the top-p set of ``logits`` [1, V].

    The set is the smallest whose mass before each token is at most ``top_p``; ranks remain those among all tokens.
    """
    row = logits[0]
    best = ops.top_logprobs(logits, np.array([row.argmax()], np.int32), 0)
    falling = np.sort(row)[::-1]
    size, mass = _top_p_size(falling, float(best.chosen[0]), top_p)
    last = falling[size - 1]
    # Of equal ones at the edge those with smaller ids are in the set.
    at_the_edge = set(np.flatnonzero(row == last)[: size - np.count_nonzero(row > last)].tolist())
    log_mass = math.log(mass)

    def share(token: int, logprob: float) -> float:
        if row[token] > last or token in at_the_edge:
            return min(max(float(np.float32(logprob - log_mass)), LOWEST), 0.0)
        return LOWEST

    top = tuple(share(token, value) for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True))
    return replace(entry, logprob=share(entry.token_id, entry.logprob), top_logprobs=top)


def _top_p_size(falling: FloatArray, best: float, top_p: float) -> tuple[int, float]:
    """Size and mass of a top-p set, from the logits in descending order and the first one's log-probability."""
    before = [0.0]
    while before[-1] <= top_p and len(before) <= len(falling):
        first = len(before) - 1
        part = falling[first : 2 * first + 128] - falling[0]
        before += accumulate((math.exp(best + below) for below in part.tolist()), initial=before.pop())
    size = bisect_right(before, top_p, hi=len(before) - 1)
    return size, before[size]
