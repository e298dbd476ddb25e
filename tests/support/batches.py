"""Batches put together by hand: one span for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.tensors import AdapterRows, Batch


@dataclass(frozen=True)
class Span:
    """Tokens ``start .. start + count`` of a sequence that lies in the blocks of ``table``."""

    table: Sequence[int]
    start: int
    count: int
    token_ids: Sequence[int] = field(default=())
    adapter: str | None = None


def make_batch(spans: Sequence[Span], block_size: int) -> Batch:
    """Packs the spans in their order; the last row of each is one whose logits are wanted."""
    positions = [np.arange(span.start, span.start + span.count) for span in spans]
    rows = [np.asarray(s.table)[p // block_size] * block_size + p % block_size for s, p in zip(spans, positions)]
    tables = np.full((len(spans), max((len(span.table) for span in spans), default=0)), -1, np.int32)
    for row, span in zip(tables, spans):
        row[: len(span.table)] = span.table
    starts = np.cumsum([0, *(span.count for span in spans)]).astype(np.int32)
    ids = [span.token_ids if len(span.token_ids) else np.zeros(span.count) for span in spans]
    return Batch(
        token_ids=_packed(ids),
        positions=_packed(positions),
        kv_rows=_packed(rows),
        span_starts=starts,
        context_lens=np.array([span.start for span in spans], np.int32),
        block_tables=tables,
        logit_rows=(starts[1:] - 1).astype(np.int32),
        adapters=_adapter_rows(spans, starts),
    )


def _adapter_rows(spans: Sequence[Span], starts: np.ndarray) -> tuple[AdapterRows, ...]:
    rows: dict[str, list[np.ndarray]] = {}
    for span, start in zip(spans, starts):
        if span.adapter is not None:
            rows.setdefault(span.adapter, []).append(np.arange(start, start + span.count))
    return tuple(AdapterRows(name, _packed(parts)) for name, parts in rows.items())


def _packed(parts: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts]) if parts else np.empty(0, np.int32)
