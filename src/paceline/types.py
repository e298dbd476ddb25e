"""What crosses the boundary between scheduler and runner: a plan goes down, a result comes up.

There is no prefill phase and no decode phase. A sequence has tokens, of which the first ``num_computed`` have their
keys and values in the store; spans let the second number catch up with the first. Chunked prefill, prefix hits and
resumption after preemption are all this one mechanism. Nothing here knows an array library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class LogprobsMode(StrEnum):
    """Which numbers are reported as log-probabilities.

    The raw ones are those of the logits as the model gave them. The processed ones are those from which a token is
    chosen, before min-p, top-k and top-p: after every edit, and divided by the temperature unless that is 0.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"


REPETITION = "repetition"
"""The stop reason of a sequence that ended because its tokens had become too sure."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How long a sequence may think. None of the sequences is empty.

    Attributes:
        limit: tokens between the start of the thinking and its end, at most.
        start: what opens a block of thinking, in the prompt or in the output.
        end: what ends it; an end of sequence while thinking becomes this.
        close: what comes when the limit is reached: ``end``, perhaps with line breaks around it.
    """

    limit: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    close: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How one sequence chooses its tokens and when it ends: sampling parameters with every text turned into ids.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: 64 bits, never absent: together with a position and a token id it determines the noise.
        max_tokens: output tokens at most; already clamped to the room in the context.
        eos_token_ids: the model's own end tokens (empty with ``ignore_eos``); ending there has no stop reason.
        stop_token_ids: the caller's end tokens; ending there reports the id.
        bad_words: sequences whose last token is masked whenever the ones before it were just generated.
        thinking: None is off.
        early_stop_window: the sequence ends once each of its last so many tokens had a probability above
            ``early_stop_threshold``, when it was chosen: after the edits and the temperature. 0 is off.
        logprobs: None is off; k asks for the chosen token and the k likeliest.
        grammar: what the output has to be, as a text for :class:`~paceline.sample.grammar.Grammars`; None is off.
        grammar_after: the grammar begins after these tokens have come in the output, which end the thinking.
            Empty: it begins at once.
        grammar_opener: only an output that begins with this token thinks; None: it thinks from the start on.
        prompt_logprobs: likewise for the prompt; such a request does not use cached prefixes. They are raw in every
            mode.
        temp_scaled_logprobs: divide raw logits by the temperature, unless that is 0, before they are normalised.
        top_p_normalized_logprobs: share the probability among the tokens of the top-p set alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    thinking: ThinkingBudget | None = None
    early_stop_window: int = 0
    early_stop_threshold: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    grammar_after: tuple[int, ...] = ()
    grammar_opener: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    temp_scaled_logprobs: bool = False
    top_p_normalized_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class SeqStart:
    """A sequence takes a slot: sent once for each running life, so again after a preemption.

    ``tokens`` is prompt plus earlier output; ``num_prompt`` never changes. The first ``num_computed`` tokens are
    already in ``blocks`` (a prefix hit). ``blocks`` are store blocks in order of position. ``adapter`` is the name of
    the adapter that the tokens are computed with; None is the model itself.
    """

    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    num_computed: int
    blocks: tuple[int, ...]
    rules: TokenRules
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class SeqSpan:
    """Tokens ``start .. start + count`` of a slot are computed in this step.

    ``start`` equals the sequence's ``num_computed``. ``new_blocks`` are appended to its table first. ``sample`` says
    that the span reaches the last token and that the next one is to be chosen.
    """

    slot: int
    start: int
    count: int
    new_blocks: tuple[int, ...] = ()
    sample: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: slots to release, then slots to start, then spans to run. Any of them may be empty."""

    step: int
    release: tuple[int, ...] = ()
    start: tuple[SeqStart, ...] = ()
    spans: tuple[SeqSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the likeliest ones.

    They are logits where :class:`LogprobsMode` says so. ``rank`` counts the tokens at least as likely as this one,
    itself included: 1 is the best. ``top_ids`` and ``top_logprobs`` run from the likeliest down, equal ones by smaller
    id.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SeqResult:
    """What a span produced.

    ``tokens`` is empty for a span that chose nothing. ``logprobs`` matches ``tokens`` if it was asked for.
    ``prompt_logprobs`` holds the entries that this span adds: for prompt positions ``start + 1 ..= start + count``
    that are still prompt. ``error`` is set when this sequence alone cannot go on (its logits are not finite, or no
    token is left to choose from); then there are no tokens. ``complete`` says that by the sequence's grammar nothing
    can follow the last token. ``likely`` tells of each token whether its probability was
    above the threshold of an early stop; empty if the sequence has none.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    complete: bool = False
    likely: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan's spans, in the order of the spans."""

    step: int
    seqs: tuple[SeqResult, ...] = field(default=())


class FinishReason(StrEnum):
    """Why a sequence ended. The values are those of the OpenAI API, but for ``abort`` and ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one sequence after a step: what the scheduler tells the text side.

    ``stop_reason`` is the id for one of the caller's stop tokens, :data:`REPETITION` for an early stop, None for
    end-of-sequence and length.
    ``num_cached_tokens`` are the prompt tokens that the prefix cache saved, at the first admission.
    ``num_likely`` is what an early stop has counted by now; whoever continues the sequence elsewhere needs it.
    ``error`` is the message of a sequence that ended with ``FinishReason.ERROR``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_likely: int = 0
    error: str | None = None
