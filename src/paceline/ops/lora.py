"""Low-rank updates of linear layers, put together from an implementation's own linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.ops.api import Linear, Ops
from paceline.tensors import FloatArray, IntArray, RawLora, RawTensor


@dataclass(frozen=True, slots=True)
class PackedLora:
    """The updates of one linear layer.

    Attributes:
        down: all updates' matrices stacked, [R, K]: one product for all of them.
        scales: [R], the factor of each output of ``down``.
        ups: of each update its first output in the layer, its first input among the R, and its matrix.
    """

    down: Linear
    scales: FloatArray
    ups: tuple[tuple[int, int, Linear], ...]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.scales.nbytes + sum(up.nbytes for _, _, up in self.ups)


def pack_lora(updates: Sequence[RawLora], pack_linear: Callable[[Sequence[RawTensor]], Linear]) -> PackedLora:
    """See :meth:`paceline.ops.api.StorageOps.pack_lora`."""
    ups: list[tuple[int, int, Linear]] = []
    rank = 0
    for update in updates:
        down, up = update.down, update.up
        if up.shape[1] != down.shape[0]:
            raise ValueError(f"{up.name} has {up.shape[1]} inputs, but {down.name} {down.shape[0]} outputs")
        ups.append((update.first, rank, pack_linear([up])))
        rank += down.shape[0]
    scales = np.repeat(
        np.array([update.scale for update in updates], np.float32), [update.down.shape[0] for update in updates]
    )
    return PackedLora(pack_linear([update.down for update in updates]), scales, tuple(ups))


def add_lora(ops: Ops, y: FloatArray, x: FloatArray, lora: PackedLora, rows: IntArray) -> None:
    """See :meth:`paceline.ops.api.LayerOps.add_lora`.

    Sums and products of numpy are rounded one by one, so that nothing here depends on how many rows there are.
    """
    z = ops.linear(ops.take_rows(x, rows), lora.down)
    z *= lora.scales
    # Neighbouring rows, as those of one span are, can be added to where they lie.
    together = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
    target = y[rows[0] : rows[-1] + 1] if together else y[rows]
    for first, rank, up in lora.ups:
        part = np.ascontiguousarray(z[:, rank : rank + up.num_inputs])
        target[:, first : first + up.num_outputs] += ops.linear(part, up)
    if not together:
        y[rows] = target
