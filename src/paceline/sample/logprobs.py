"""Log-probabilities as callers see them: finite numbers, and tokens of the tokenizer only."""

from __future__ import annotations

import math

import numpy as np

from paceline.ops.api import Ops
from paceline.tensors import FloatArray, IntArray
from paceline.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for a probability of zero, which JSON cannot write as a logarithm; OpenAI's API uses the same number."""

NOT_FINITE = "the logits are not finite"


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


def prompt_logprobs(ops: Ops, logits: FloatArray, targets: IntArray, k: int, vocab_size: int) -> list[TokenLogprobs]:
    """:func:`token_logprobs` of the prompt tokens [R] that follow the rows. Raises ArithmeticError for a bad row."""
    results: list[TokenLogprobs] = []
    for result in token_logprobs(ops, logits, targets, k, vocab_size):
        if result is None:
            raise ArithmeticError(NOT_FINITE)
        results.append(result)
    return results
