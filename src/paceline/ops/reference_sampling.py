"""The choice of tokens in numpy, one row at a time.

Everything a row goes through is either exactly rounded, a comparison, or a sum or exponential over arrays whose length
follows from the row alone; so its result has the same bits whatever the other rows are.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.ops import noise
from paceline.tensors import Array, ChoiceControls, FloatArray, IntArray, LogitEdits, TopLogprobs

_Ids = npt.NDArray[np.intp]

_OUT_OF_REACH = np.float32(noise.GUMBEL_MIN - noise.GUMBEL_MAX)
"""A token this far below the best cannot win: its noise at its highest is less than the best one's at its lowest."""

_NUCLEUS_GUESS = 256
"""Tokens sorted at first in the search for the top-p set; most sets are smaller, and few need the next sizes."""


def edit_logits(logits: FloatArray, edits: LogitEdits) -> None:
    """See :meth:`paceline.ops.api.Ops.edit_logits`."""
    width = logits.shape[1]
    for ids in (edits.bias_ids, edits.seen_ids, edits.banned_ids):
        _check_ids(ids, width)
    logits[:, edits.vocab_size :] = -np.inf
    for row, bits in zip(edits.allowed_rows, edits.allowed_bits, strict=True):
        allowed = np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little")[:width]
        logits[row, allowed == 0] = -np.inf
    for row in np.flatnonzero(np.diff(edits.bias_starts)):
        part = slice(edits.bias_starts[row], edits.bias_starts[row + 1])
        logits[row, edits.bias_ids[part]] += edits.bias_values[part]
    for row in np.flatnonzero(np.diff(edits.seen_starts)):
        part = slice(edits.seen_starts[row], edits.seen_starts[row + 1])
        ids = edits.seen_ids[part]
        logits[row, ids] = _penalise(
            logits[row, ids], edits.seen_counts[part], edits.repetition[row], edits.frequency[row], edits.presence[row]
        )
    for row in np.flatnonzero(np.diff(edits.banned_starts)):
        logits[row, edits.banned_ids[edits.banned_starts[row] : edits.banned_starts[row + 1]]] = -np.inf


def choose(logits: FloatArray, controls: ChoiceControls) -> IntArray:
    """See :meth:`paceline.ops.api.Ops.choose`."""
    chosen = np.empty(len(logits), np.int32)
    for r, row in enumerate(logits):
        best = int(row.argmax())  # the first of equals; a NaN anywhere is taken for the largest
        if not math.isfinite(row[best]):
            chosen[r] = -1
        elif controls.temperature[r] == 0:
            chosen[r] = best
        else:
            with np.errstate(over="ignore"):  # minus infinity is right for what is that far below
                z = (row - row[best]) / controls.temperature[r]
            ids = kept_ids(z, int(controls.top_k[r]), float(controls.top_p[r]), float(controls.min_p[r]))
            ids = np.sort(ids[z[ids] > _OUT_OF_REACH])
            scores = z[ids] + noise.gumbel(int(controls.seeds[r]), int(controls.positions[r]), ids)
            chosen[r] = ids[scores.argmax()]
    return chosen


def top_logprobs(logits: FloatArray, chosen: IntArray, k: int) -> TopLogprobs:
    """See :meth:`paceline.ops.api.Ops.top_logprobs`. The sum of the exponentials is kept in float64."""
    num_rows, width = logits.shape
    _check_ids(chosen, width)
    k = min(k, width)
    result = TopLogprobs(
        chosen=np.full(num_rows, np.nan, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=np.zeros((num_rows, k), np.int32),
        top_values=np.full((num_rows, k), np.nan, np.float32),
    )
    for r, row in enumerate(logits):
        peak = row.max()
        if not math.isfinite(peak):
            continue
        with np.errstate(over="ignore"):
            z = row - peak
        log_sum = math.log(np.exp(z).sum(dtype=np.float64))
        top = _largest(row, k)
        result.chosen[r] = float(z[chosen[r]]) - log_sum
        result.ranks[r] = np.count_nonzero(row >= row[chosen[r]])
        result.top_ids[r] = top
        result.top_values[r] = z[top].astype(np.float64) - log_sum
    return result


def kept_ids(z: FloatArray, top_k: int, top_p: float, min_p: float) -> _Ids:
    """The ids that min-p, top-k and top-p leave, in no particular order; ``z`` is [V] float32, its largest 0."""
    ids: _Ids = np.flatnonzero(z >= np.float32(math.log(min_p))) if min_p > 0 else np.arange(len(z))
    if top_k > 0:
        ids = ids[_largest(z[ids], top_k)]
    if top_p < 1:
        mass_of = np.exp(z)
        total = mass_of[ids].sum(dtype=np.float64) if top_k > 0 else mass_of.sum(dtype=np.float64)
        ids = _nucleus(z, mass_of, ids, top_p * total)
    return ids


def _nucleus(z: FloatArray, mass_of: FloatArray, ids: _Ids, limit: float) -> _Ids:
    """Those of ``ids`` with at most ``limit`` mass before them, in order of descending z, equal ones as they stand.

    Only as many tokens are sorted as it takes to reach the limit; running sums do not depend on what comes after.
    """
    count = _NUCLEUS_GUESS
    while True:
        head = ids[_largest(z[ids], count)]
        before = np.concatenate(([0.0], np.cumsum(mass_of[head], dtype=np.float64)[:-1]))
        kept = int(np.count_nonzero(before <= limit))
        if kept < len(head) or len(head) == len(ids):
            return head[:kept]
        count *= 8


def _largest(values: FloatArray, k: int) -> _Ids:
    """Indices of the k largest values (all, if there are fewer), descending, equal ones by smaller index. No NaN."""
    if k < len(values):
        last = np.partition(values, len(values) - k)[len(values) - k] if k else np.inf
        above = np.flatnonzero(values > last)
        equal = np.flatnonzero(values == last)[: k - len(above)]
        indices = np.concatenate((above, equal))
    else:
        indices = np.arange(len(values))
    return indices[np.argsort(-values[indices], kind="stable")]


def _penalise(z: FloatArray, counts: IntArray, repetition: float, frequency: float, presence: float) -> FloatArray:
    """Formula and order of :class:`~paceline.tensors.LogitEdits`, each operation rounded to float32."""
    with np.errstate(over="ignore", invalid="ignore"):  # what cannot be represented is found by ``choose``
        z = np.where(z < 0, z * repetition, z / repetition)
        return np.where(counts > 0, z - counts.astype(np.float32) * frequency - presence, z)


def _check_ids(ids: Array, width: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= width):
        raise ValueError(f"token ids {int(ids.min())} .. {int(ids.max())} are outside the vocabulary 0 .. {width - 1}")
