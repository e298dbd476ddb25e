"""From the spans of a plan to the arrays of one forward pass. A pure function of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from paceline.slots import Slots
from paceline.tensors import AdapterRows, Batch, IntArray
from paceline.types import SeqSpan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows whose logits score the prompt token that follows them.

    Attributes:
        span: index of the span in the plan.
        rows: packed tokens, ascending.
        targets: the prompt token after each of them.
        k: likeliest tokens wanted, -1 for the whole vocabulary.
    """

    span: int
    rows: IntArray
    targets: IntArray
    k: int


def build_batch(spans: Sequence[SeqSpan], slots: Slots) -> Batch:
    """Pack the spans' tokens in the order of the spans. ``logit_rows`` are the last rows of the spans that sample."""
    # Few calls of numpy: between two forward passes, which empty the caches, each costs like many turns of a loop.
    counts = [span.count for span in spans]
    ends = list(accumulate(counts))
    slot_of_span = np.array([span.slot for span in spans], np.int32)
    slot_of_token = np.repeat(slot_of_span, counts) if spans else slot_of_span
    positions = np.array([p for span in spans for p in range(span.start, span.start + span.count)], np.int32)
    block, offset = np.divmod(positions, np.int32(slots.block_size))
    # Only the blocks of the longest sequence in the step go down; the widest table would be copied for nothing.
    width = max((slots.num_blocks[span.slot] for span in spans), default=0)
    return Batch(
        token_ids=slots.tokens[slot_of_token, positions],
        positions=positions,
        kv_rows=slots.block_tables[slot_of_token, block] * np.int32(slots.block_size) + offset,
        span_starts=np.array([0, *ends], np.int32),
        context_lens=np.array([span.start for span in spans], np.int32),
        block_tables=slots.block_tables[slot_of_span, :width],
        logit_rows=np.array([end - 1 for span, end in zip(spans, ends, strict=True) if span.sample], np.int32),
        adapters=_adapter_rows(spans, ends, slots),
    )


def _adapter_rows(spans: Sequence[SeqSpan], ends: Sequence[int], slots: Slots) -> tuple[AdapterRows, ...]:
    """The rows of each adapter that one of the spans has."""
    rows: dict[str, list[int]] = {}
    for span, end in zip(spans, ends, strict=True):
        name = slots.adapters[span.slot]
        if name is not None:
            rows.setdefault(name, []).extend(range(end - span.count, end))
    return tuple(AdapterRows(name, np.array(each, np.int32)) for name, each in rows.items())


def prompt_rows(spans: Sequence[SeqSpan], slots: Slots, batch: Batch) -> list[PromptRows]:
    """The rows to score, for the spans whose request asked for the log-probabilities of its prompt.

    The row at position p scores the token at p + 1, as long as that is still prompt; nothing scores the first token.
    """
    wanted: list[PromptRows] = []
    for index, span in enumerate(spans):
        k = slots.prompt_logprobs[span.slot]
        if k is None:
            continue
        count = min(span.start + span.count, slots.num_prompt[span.slot] - 1) - span.start
        if count <= 0:
            continue
        rows = batch.span_starts[index] + np.arange(count, dtype=np.int32)
        targets = slots.tokens[span.slot, span.start + 1 : span.start + 1 + count]
        wanted.append(PromptRows(index, rows, targets, k))
    return wanted
