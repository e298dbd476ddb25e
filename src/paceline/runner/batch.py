"""From the spans of a plan to the arrays of one forward pass. A pure function of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.slots import Slots
from paceline.tensors import Batch, IntArray
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
    slot_of_span = np.array([span.slot for span in spans], np.int32)
    starts = np.array([span.start for span in spans], np.int32)
    counts = np.array([span.count for span in spans], np.int32)
    span_starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(counts, out=span_starts[1:])

    span_of_token = np.repeat(np.arange(len(spans)), counts)
    slot_of_token = slot_of_span[span_of_token]
    offsets = np.arange(span_starts[-1], dtype=np.int32) - span_starts[span_of_token]
    positions = (starts[span_of_token] + offsets).astype(np.int32)
    blocks = slots.block_tables[slot_of_token, positions // slots.block_size]
    # Only the blocks of the longest sequence in the step go down; the widest table would be copied for nothing.
    width = int(slots.num_blocks[slot_of_span].max(initial=0))
    samples = np.array([span.sample for span in spans], np.bool_)
    return Batch(
        token_ids=slots.tokens[slot_of_token, positions],
        positions=positions,
        kv_rows=(blocks * slots.block_size + positions % slots.block_size).astype(np.int32),
        span_starts=span_starts,
        context_lens=starts,
        block_tables=slots.block_tables[slot_of_span, :width],
        logit_rows=(span_starts[1:] - 1)[samples],
    )


def prompt_rows(spans: Sequence[SeqSpan], slots: Slots, batch: Batch) -> list[PromptRows]:
    """The rows to score, for the spans whose request asked for the log-probabilities of its prompt.

    The row at position p scores the token at p + 1, as long as that is still prompt; nothing scores the first token.
    """
    wanted: list[PromptRows] = []
    for index, span in enumerate(spans):
        k = int(slots.prompt_logprobs[span.slot])
        if k == Slots.OFF:
            continue
        count = min(span.start + span.count, int(slots.num_prompt[span.slot]) - 1) - span.start
        if count <= 0:
            continue
        rows = batch.span_starts[index] + np.arange(count, dtype=np.int32)
        targets = slots.tokens[span.slot, span.start + 1 : span.start + 1 + count]
        wanted.append(PromptRows(index, rows, targets, k))
    return wanted
