"""When a sequence ends, as far as tokens tell. Stop strings are found in the text, later and elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from paceline.types import REPETITION, FinishReason, TokenRules


class Stop(NamedTuple):
    """``stop_reason`` is the id for one of the caller's stop tokens, or REPETITION, else None; ``error`` explains an
    error."""

    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


def find_stop(
    token: int,
    num_output: int,
    num_tokens: int,
    rules: TokenRules,
    max_model_len: int,
    *,
    num_likely: int = 0,
    complete: bool = False,
) -> Stop | None:
    """Whether a sequence ends with ``token``, its output token number ``num_output``, ``num_tokens`` with the prompt.

    An end token counts only beyond ``min_tokens``. One that is both the caller's and the model's reports its id, for
    the caller asked to know. An end token in the last allowed place is a stop, not a limit. ``num_likely`` output
    tokens up to this one were likely in an unbroken row: an early stop needs as many, and leaves ``min_tokens``.
    ``complete`` says that by the sequence's grammar nothing can follow: that ends it also before ``min_tokens``.
    """
    if num_output > rules.min_tokens:
        if token in rules.stop_token_ids:
            return Stop(FinishReason.STOP, token)
        if token in rules.eos_token_ids:
            return Stop(FinishReason.STOP)
    if complete:
        return Stop(FinishReason.STOP)
    if 0 < rules.early_stop_window <= num_likely and num_output >= rules.min_tokens:
        return Stop(FinishReason.STOP, REPETITION)
    if num_output >= rules.max_tokens or num_tokens >= max_model_len:
        return Stop(FinishReason.LENGTH)
    return None
