"""The operations on the processor's own vector units: native kernels over numpy arrays.

``docs/kernels.md`` explains the packed layouts; ``docs/numerics.md`` the order of every sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paceline import _native
from paceline.dequantize import to_float32
from paceline.ops.api import Activation, Forward, LayerOps, RopeStyle, RopeTable, Routing
from paceline.ops.lora import PackedLora, add_lora, pack_lora
from paceline.ops.program import capture, or_empty, routing_rule
from paceline.tensors import (
    Batch,
    ChoiceControls,
    Encoding,
    FloatArray,
    Heads,
    IntArray,
    KvLayout,
    LogitEdits,
    RawLora,
    RawTensor,
    TopLogprobs,
)

NUMERICS_VERSION = 3
"""Counts changes after which the same model gives other bits."""


class CpuOps:
    """See :class:`paceline.ops.api.Ops` for each operation's contract.

    Args:
        num_threads: threads that share each operation; the results do not depend on it.
        isa: the instruction set, one of ``paceline._native.levels()``; None takes the widest that this machine runs.
        quantization: "int8" or "int4" packs dense matrices in that form (sensitive ones in int8); None keeps them.

    Raises ValueError for a value that is none of these.
    """

    def __init__(self, num_threads: int, isa: str | None = None, quantization: str | None = None) -> None:
        self._cpu = _native.Cpu(num_threads, isa or "")
        self._quantization = quantization or ""

    @property
    def num_threads(self) -> int:
        return self._cpu.num_threads

    @property
    def isa(self) -> str:
        return self._cpu.isa

    @property
    def numerics(self) -> str:
        """The instruction set is named where it may matter: only products of bfloat16 pairs have bits of their own."""
        dense = self._quantization or self._cpu.bf16_name or ""
        return f"cpu-kv-bf16{'-' if dense else ''}{dense}/{NUMERICS_VERSION}"

    # ---- weights

    def linear_form(self, encoding: Encoding, *, sensitive: bool = False) -> str:
        return _native.linear_form(encoding.label, self._target(sensitive))

    def pack_linear(
        self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = (), *, sensitive: bool = False
    ) -> _native.Linear:
        """Dense matrices keep their precision unless ``quantization`` is set; ``docs/kernels.md`` has the others."""
        return self._pack(parts, bias, self._target(sensitive))

    def pack_lora(self, updates: Sequence[RawLora]) -> PackedLora:
        """Never quantised: the matrices are small. With ``quantization`` those in bfloat16 become float32.

        That changes none of their numbers, but ``numerics`` then names no path for products of bfloat16 pairs.
        """
        widen = bool(self._quantization)
        return pack_lora(updates, lambda parts: self._pack([_widened(p) if widen else p for p in parts], (), ""))

    def _pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor], target: str) -> _native.Linear:
        widths = {part.shape[-1] for part in parts}
        if len(widths) != 1:
            raise ValueError(f"matrices with {sorted(widths)} inputs cannot be stacked")
        rows = [(part.encoding.label, part.shape[0], part.data) for part in parts]
        biases = [self.vector(part) for part in bias]
        stacked = np.concatenate(biases) if biases else np.empty(0, np.float32)
        try:
            return self._cpu.pack_linear(rows, widths.pop(), stacked, target)
        except ValueError as error:
            raise ValueError(f"{', '.join(part.name for part in parts)}: {error}") from error

    def pack_experts(self, gate_up: Sequence[Sequence[RawTensor]], down: Sequence[RawTensor]) -> _native.Experts:
        """At most 1,024 experts; each matrix is kept as :meth:`pack_linear` keeps it."""
        return _native.Experts(
            [self.pack_linear(parts) for parts in gate_up], [self.pack_linear([part]) for part in down]
        )

    def _target(self, sensitive: bool) -> str:
        """What dense matrices are to become."""
        return "int8" if sensitive and self._quantization else self._quantization

    def pack_embedding(self, table: RawTensor) -> _native.Embedding:
        return _native.Embedding(table.encoding.label, table.shape[0], table.shape[1], table.data)

    def vector(self, tensor: RawTensor, offset: float = 0.0) -> FloatArray:
        values = np.empty(tensor.shape[-1], np.float32)
        _native.decode(tensor.encoding.label, tensor.data, values)
        return values + np.float32(offset) if offset else values

    # ---- keys and values

    def kv_block_bytes(self, layout: KvLayout, block_size: int) -> int:
        return _native.kv_block_bytes(layout.num_layers, layout.num_kv, layout.head_dim, block_size)

    def make_kv(self, layout: KvLayout, num_blocks: int, block_size: int) -> _native.KvStore:
        """Keys and values are bfloat16. ``head_dim`` must be even; blocks are best a multiple of 16."""
        return _native.KvStore(layout.num_layers, layout.num_kv, layout.head_dim, num_blocks, block_size)

    # ---- the layers' operations

    def embed(self, token_ids: IntArray, table: _native.Embedding, scale: float = 1.0) -> FloatArray:
        out = np.empty((len(token_ids), table.width), np.float32)
        self._cpu.embed(token_ids, table, scale, out)
        return out

    def linear(self, x: FloatArray, weight: _native.Linear) -> FloatArray:
        out = np.empty((len(x), weight.num_outputs), np.float32)
        self._cpu.linear(x, weight, out)
        return out

    def add_lora(self, y: FloatArray, x: FloatArray, lora: PackedLora, rows: IntArray) -> None:
        add_lora(self, y, x, lora, rows)

    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        out = np.empty_like(x)
        self._cpu.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, residual: FloatArray, update: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        out = np.empty_like(residual)
        self._cpu.add_rms_norm(residual, update, weight, eps, out)
        return out

    def layer_norm(self, x: FloatArray, weight: FloatArray, bias: FloatArray, eps: float) -> FloatArray:
        out = np.empty_like(x)
        self._cpu.layer_norm(x, weight, bias, eps, out)
        return out

    def add(self, x: FloatArray, update: FloatArray) -> None:
        self._cpu.add(x, update)

    def qk_norm(self, qkv: FloatArray, heads: Heads, q_weight: FloatArray, k_weight: FloatArray, eps: float) -> None:
        self._cpu.qk_norm(qkv, heads.shape, q_weight, k_weight, eps)

    def rope(self, qkv: FloatArray, heads: Heads, positions: IntArray, table: RopeTable) -> None:
        neighbours, axes = table.style is RopeStyle.PAIRS, or_empty(table.axes, np.int32)
        self._cpu.rope(qkv, heads.shape, positions, table.cos, table.sin, neighbours, axes)

    def write_kv(self, qkv: FloatArray, heads: Heads, kv: _native.KvStore, layer: int, kv_rows: IntArray) -> None:
        self._cpu.write_kv(qkv, heads.shape, kv, layer, kv_rows)

    def attention(
        self,
        qkv: FloatArray,
        heads: Heads,
        kv: _native.KvStore,
        layer: int,
        batch: Batch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> FloatArray:
        out = np.empty((len(qkv), heads.num_q * heads.head_dim), np.float32)
        self._cpu.attention(
            qkv, heads.shape, kv, layer,
            batch.span_starts, batch.context_lens, batch.block_tables,
            scale, window, softcap, out,
        )  # fmt: skip
        return out

    def gated_activation(self, gate_up: FloatArray, activation: Activation) -> FloatArray:
        out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        self._cpu.gated_activation(gate_up, activation.value, out)
        return out

    def activate(self, x: FloatArray, activation: Activation) -> None:
        self._cpu.activate(x, activation.value)

    def route(
        self, logits: FloatArray, routing: Routing, bias: FloatArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        """At most 1,024 experts."""
        shape = len(logits), routing.top_k
        ids, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._cpu.route(logits, routing_rule(routing), or_empty(bias, np.float32), ids, weights)
        return ids, weights

    def experts(
        self, x: FloatArray, ids: IntArray, weights: FloatArray, experts: _native.Experts, activation: Activation
    ) -> FloatArray:
        out = np.empty_like(x)
        self._cpu.experts(x, ids, weights, experts, activation.value, out)
        return out

    def softcap(self, x: FloatArray, cap: float) -> None:
        self._cpu.softcap(x, cap)

    def capture(self, build: Callable[[LayerOps], Forward]) -> Forward:
        return capture(self._cpu, self, build)

    # ---- encoders

    def encoder_attention(
        self, qkv: FloatArray, heads: Heads, segment_starts: IntArray, scale: float, softcap: float = 0.0
    ) -> FloatArray:
        out = np.empty((len(qkv), heads.num_q * heads.head_dim), np.float32)
        self._cpu.encoder_attention(qkv, heads.shape, segment_starts, scale, softcap, out)
        return out

    # ---- the choice of tokens

    def take_rows(self, x: FloatArray, rows: IntArray) -> FloatArray:
        out = np.empty((len(rows), x.shape[1]), np.float32)
        self._cpu.take_rows(x, rows, out)
        return out

    def edit_logits(self, logits: FloatArray, edits: LogitEdits) -> None:
        self._cpu.edit_logits(
            logits, edits.vocab_size, edits.allowed_rows, edits.allowed_bits,
            edits.bias_starts, edits.bias_ids, edits.bias_values,
            edits.seen_starts, edits.seen_ids, edits.seen_counts,
            edits.repetition, edits.frequency, edits.presence,
            edits.banned_starts, edits.banned_ids,
        )  # fmt: skip

    def choose(self, logits: FloatArray, controls: ChoiceControls) -> IntArray:
        chosen = np.empty(len(logits), np.int32)
        self._cpu.choose(
            logits, controls.temperature, controls.top_k, controls.top_p, controls.min_p,
            controls.seeds, controls.positions, chosen,
        )  # fmt: skip
        return chosen

    def top_logprobs(self, logits: FloatArray, chosen: IntArray, k: int) -> TopLogprobs:
        num_rows, width = logits.shape
        k = min(k, width)
        result = TopLogprobs(
            chosen=np.empty(num_rows, np.float32),
            ranks=np.empty(num_rows, np.int32),
            top_ids=np.empty((num_rows, k), np.int32),
            top_values=np.empty((num_rows, k), np.float32),
        )
        self._cpu.top_logprobs(logits, chosen, result.chosen, result.ranks, result.top_ids, result.top_values)
        return result


def _widened(tensor: RawTensor) -> RawTensor:
    return replace(tensor, encoding=Encoding.F32, data=to_float32(tensor).reshape(-1).view(np.uint8))
