"""Forward passes as native programs: the operations are written down once and run without Python in between.

The pass is run once with a :class:`Recorder` for its operations and with a batch of no tokens. Each array that it sees
has no rows, the right width, and stands for one array of the program; it is recognised by being that very object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline import _native
from paceline.ops.api import Activation, Forward, LayerOps, RopeStyle, RopeTable, Routing
from paceline.tensors import Array, Batch, FloatArray, Heads, IntArray


def capture(cpu: _native.Cpu, ops: LayerOps, build: Callable[[LayerOps], Forward]) -> Forward:
    """See :meth:`paceline.ops.api.Ops.capture`; ``ops`` are those of ``cpu``."""
    program = _native.Program(cpu)
    recorder = Recorder(program)
    result = build(recorder)(recorder.batch, recorder.kv)
    program.finish(recorder.number(result))
    return CapturedForward(program, result.shape[1], build(ops))


def or_empty(array: Array | None, dtype: type[np.generic]) -> Array:
    """An array that may be missing, as the native kernels take it."""
    return np.empty(0, dtype) if array is None else array


def routing_rule(routing: Routing) -> tuple[int, str, bool, float, int, int]:
    """As the native kernels take it."""
    scoring, groups = routing.scoring.value, (routing.num_groups, routing.top_groups)
    return (routing.top_k, scoring, routing.renormalize, routing.scale, *groups)


class CapturedForward:
    """Runs the program. The memory that it works in grows to what the largest batch needs and is kept.

    ``by_calls`` is the same pass without a program, for batches with adapters: those need calls of their own.
    """

    def __init__(self, program: _native.Program, width: int, by_calls: Forward) -> None:
        self._program = program
        self._width = width
        self._by_calls = by_calls
        # numpy's memory, so that the profile of a step's memory sees it.
        self._workspace = np.empty(0, np.uint8)

    def __call__(self, batch: Batch, kv: _native.KvStore) -> FloatArray:
        if batch.adapters:
            return self._by_calls(batch, kv)
        rows = len(batch.token_ids)
        needed = self._program.workspace_bytes(rows)
        if len(self._workspace) < needed:
            self._workspace = np.empty(needed, np.uint8)
        out = np.empty((rows, self._width), np.float32)
        self._program.run(
            batch.token_ids, batch.positions, batch.kv_rows, batch.span_starts, batch.context_lens, batch.block_tables,
            kv, self._workspace, out,
        )  # fmt: skip
        return out


class Recorder:
    """Operations that write themselves down. What they refuse is what a program cannot do; all raise ValueError."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._arrays: dict[int, tuple[Array, int]] = {}  # by identity; the array is kept so that no other takes its id
        self.kv = object()
        none = [np.empty(0, np.int32) for _ in range(5)]
        self.batch = Batch(
            token_ids=none[0],
            positions=none[1],
            kv_rows=none[2],
            span_starts=np.zeros(1, np.int32),
            context_lens=none[3],
            block_tables=np.empty((0, 0), np.int32),
            logit_rows=none[4],
        )

    def number(self, array: Array) -> int:
        """The program's array that this one stands for."""
        try:
            return self._arrays[id(array)][1]
        except KeyError:
            raise ValueError("a captured forward pass may only use arrays that its operations have returned") from None

    def embed(self, token_ids: IntArray, table: Any, scale: float = 1.0) -> FloatArray:
        _require(token_ids is self.batch.token_ids, "embed", "token_ids")
        return self._array(self._program.embed(table, scale), table.width)

    def linear(self, x: FloatArray, weight: Any) -> FloatArray:
        return self._array(self._program.linear(self.number(x), weight), weight.num_outputs)

    def add_lora(self, y: FloatArray, x: FloatArray, lora: Any, rows: IntArray) -> None:  # noqa: ARG002
        raise ValueError("a captured forward pass has no adapters")

    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        return self._array(self._program.rms_norm(self.number(x), weight, eps), x.shape[1])

    def add_rms_norm(self, residual: FloatArray, update: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        out = self._program.add_rms_norm(self.number(residual), self.number(update), weight, eps)
        return self._array(out, residual.shape[1])

    def layer_norm(self, x: FloatArray, weight: FloatArray, bias: FloatArray, eps: float) -> FloatArray:
        return self._array(self._program.layer_norm(self.number(x), weight, bias, eps), x.shape[1])

    def add(self, x: FloatArray, update: FloatArray) -> None:
        self._program.add(self.number(x), self.number(update))

    def qk_norm(self, qkv: FloatArray, heads: Heads, q_weight: FloatArray, k_weight: FloatArray, eps: float) -> None:
        self._program.qk_norm(self.number(qkv), heads.shape, q_weight, k_weight, eps)

    def rope(self, qkv: FloatArray, heads: Heads, positions: IntArray, table: RopeTable) -> None:
        _require(positions is self.batch.positions, "rope", "positions")
        neighbours, axes = table.style is RopeStyle.PAIRS, or_empty(table.axes, np.int32)
        self._program.rope(self.number(qkv), heads.shape, table.cos, table.sin, neighbours, axes)

    def write_kv(self, qkv: FloatArray, heads: Heads, kv: Any, layer: int, kv_rows: IntArray) -> None:
        _require(kv is self.kv, "write_kv", "store")
        _require(kv_rows is self.batch.kv_rows, "write_kv", "kv_rows")
        self._program.write_kv(self.number(qkv), heads.shape, layer)

    def attention(
        self,
        qkv: FloatArray,
        heads: Heads,
        kv: Any,
        layer: int,
        batch: Batch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> FloatArray:
        _require(kv is self.kv, "attention", "store")
        _require(batch is self.batch, "attention", "batch")
        out = self._program.attention(self.number(qkv), heads.shape, layer, scale, window, softcap)
        return self._array(out, heads.num_q * heads.head_dim)

    def gated_activation(self, gate_up: FloatArray, activation: Activation) -> FloatArray:
        out = self._program.gated_activation(self.number(gate_up), activation.value)
        return self._array(out, gate_up.shape[1] // 2)

    def activate(self, x: FloatArray, activation: Activation) -> None:
        self._program.activate(self.number(x), activation.value)

    def route(
        self, logits: FloatArray, routing: Routing, bias: FloatArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        rule = routing_rule(routing)
        ids, weights = self._program.route(self.number(logits), rule, or_empty(bias, np.float32))
        chosen = np.empty((0, routing.top_k), np.int32)
        self._arrays[id(chosen)] = (chosen, ids)
        return chosen, self._array(weights, routing.top_k)

    def experts(
        self, x: FloatArray, ids: IntArray, weights: FloatArray, experts: Any, activation: Activation
    ) -> FloatArray:
        choice = self.number(ids), self.number(weights)
        return self._array(self._program.experts(self.number(x), *choice, experts, activation.value), x.shape[1])

    def softcap(self, x: FloatArray, cap: float) -> None:
        self._program.softcap(self.number(x), cap)

    def _array(self, number: int, width: int) -> FloatArray:
        array = np.empty((0, width), np.float32)
        self._arrays[id(array)] = (array, number)
        return array


def _require(same: bool, operation: str, what: str) -> None:
    if not same:
        raise ValueError(f"in a captured forward pass {operation} takes the {what} of the pass")
