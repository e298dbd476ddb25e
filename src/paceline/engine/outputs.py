"""What the callers of an engine receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one step added to one choice of a request. The texts of all deltas of a choice join to its whole text.

    ``token_ids`` and ``logprobs`` come with the delta that releases the last of their text, or with the final one.
    ``finish_reason`` is set on the final delta only; ``stop_reason`` is then the stop id or string that ended it, None
    for end-of-sequence and length. ``error`` explains ``FinishReason.ERROR``.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``logprobs`` matches ``token_ids``, or is None if it was not asked for.

    ``finish_reason`` is a value of :class:`~paceline.types.FinishReason`; ``error`` explains "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt. ``prompt_logprobs[0]`` is None: nothing predicts the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
