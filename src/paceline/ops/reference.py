"""The operations in numpy, written to be read: what every other implementation is compared with.

Three rules make a row's result independent of the rows beside it:

* Sums run over one token's row at a time, so the shapes that numpy and BLAS see never depend on the number of rows. A
  linear layer is one matrix-vector product for each token.
* Exponentials and hyperbolic tangents are also taken one row at a time: a vector loop and its scalar tail may round
  differently, and where the tail begins must depend on the row's own width alone. Additions, products and quotients
  are exactly rounded and may run over whole arrays.
* BLAS runs on one thread, for the partition of its sums would otherwise follow the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from threadpoolctl import ThreadpoolController

from paceline.dequantize import to_float32
from paceline.ops import reference_sampling
from paceline.ops.api import Activation, Forward, LayerOps, RopeStyle, RopeTable, Routing, Scoring
from paceline.ops.lora import PackedLora, add_lora, pack_lora
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

LINEAR_TILE = 1 << 17
"""Weights of the outputs that are computed together: they stay in the processor's cache from one token to the next.
The tiles follow from the matrix alone, never from the number of tokens."""


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """``weight`` is [N, K] float32, ``bias`` [N] float32 or None."""

    weight: FloatArray
    bias: FloatArray | None

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def form(self) -> str:
        return "f32"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Each expert's layers."""

    gate_up: Sequence[ReferenceLinear]
    down: Sequence[ReferenceLinear]

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def width(self) -> int:
        return self.gate_up[0].num_inputs

    @property
    def form(self) -> str:
        return "f32"

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down))


@dataclass(frozen=True, slots=True)
class ReferenceEmbedding:
    """The table as it lies in its file: only the rows that are looked up are ever dequantised."""

    table: RawTensor

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def nbytes(self) -> int:
        return self.table.data.nbytes


@dataclass(frozen=True, slots=True)
class ReferenceKv:
    """``keys`` and ``values`` are [num_layers, num_blocks, block_size, num_kv, head_dim] float32."""

    keys: FloatArray
    values: FloatArray

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[1])

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class ReferenceOps:
    """See :class:`paceline.ops.api.Ops` for each operation's contract."""

    def __init__(self) -> None:
        libraries = ThreadpoolController()
        # Once and for the whole process: entering and leaving a limit around every product would cost more than the
        # product. Nothing else here uses BLAS.
        libraries.limit(limits=1, user_api="blas")
        # The kernels that BLAS picked for this processor, where it tells: they decide the order of its sums.
        kernels = {library["architecture"] for library in libraries.info() if "architecture" in library}
        self._numerics = " ".join(["reference-f32/1", f"numpy-{np.__version__}", *sorted(kernels)])

    @property
    def numerics(self) -> str:
        return self._numerics

    # ---- weights

    def linear_form(self, encoding: Encoding, *, sensitive: bool = False) -> str:  # noqa: ARG002
        return "f32"

    def pack_linear(
        self,
        parts: Sequence[RawTensor],
        bias: Sequence[RawTensor] = (),
        *,
        sensitive: bool = False,  # noqa: ARG002
    ) -> ReferenceLinear:
        widths = {part.shape[-1] for part in parts}
        if len(widths) != 1:
            raise ValueError(f"matrices with {sorted(widths)} inputs cannot be stacked")
        weight = _stack(parts)
        stacked_bias = _stack(bias) if bias else None
        if stacked_bias is not None and stacked_bias.shape != weight.shape[:1]:
            raise ValueError(f"{weight.shape[0]} outputs do not match a bias of shape {stacked_bias.shape}")
        return ReferenceLinear(weight, stacked_bias)

    def pack_lora(self, updates: Sequence[RawLora]) -> PackedLora:
        return pack_lora(updates, self.pack_linear)

    def pack_experts(self, gate_up: Sequence[Sequence[RawTensor]], down: Sequence[RawTensor]) -> ReferenceExperts:
        experts = ReferenceExperts(
            [self.pack_linear(parts) for parts in gate_up], [self.pack_linear([part]) for part in down]
        )
        if not down:
            raise ValueError("there must be as many down matrices as pairs of gate and up, at least 1")
        shapes = {(a.weight.shape, b.weight.shape) for a, b in zip(experts.gate_up, experts.down, strict=True)}
        (two_hidden, width), back = next(iter(shapes))
        if len(shapes) != 1 or back != (width, two_hidden // 2):
            raise ValueError(f"matrices of shapes {sorted(shapes)} do not fit together")
        return experts

    def pack_embedding(self, table: RawTensor) -> ReferenceEmbedding:
        return ReferenceEmbedding(table)

    def vector(self, tensor: RawTensor, offset: float = 0.0) -> FloatArray:
        values = to_float32(tensor)
        return values + offset if offset else values

    # ---- keys and values

    def kv_block_bytes(self, layout: KvLayout, block_size: int) -> int:
        elements = layout.num_layers * block_size * layout.num_kv * layout.head_dim
        return 2 * elements * np.dtype(np.float32).itemsize

    def make_kv(self, layout: KvLayout, num_blocks: int, block_size: int) -> ReferenceKv:
        shape = (layout.num_layers, num_blocks, block_size, layout.num_kv, layout.head_dim)
        return ReferenceKv(np.empty(shape, np.float32), np.empty(shape, np.float32))

    # ---- the layers' operations

    def embed(self, token_ids: IntArray, table: ReferenceEmbedding, scale: float = 1.0) -> FloatArray:
        _check_range("token id", token_ids, table.num_rows)
        raw = table.table
        rows = raw.data.reshape(table.num_rows, raw.row_bytes)[token_ids]
        chosen = RawTensor(raw.name, (len(token_ids), table.width), raw.encoding, rows.reshape(-1))
        return to_float32(chosen) * scale

    def linear(self, x: FloatArray, weight: ReferenceLinear) -> FloatArray:
        out = np.empty((len(x), weight.num_outputs), np.float32)
        step = max(1, LINEAR_TILE // weight.num_inputs)
        for first in range(0, weight.num_outputs, step):
            part = slice(first, first + step)
            for t in range(len(x)):
                np.dot(weight.weight[part], x[t], out=out[t, part])
        if weight.bias is not None:
            out += weight.bias
        return out

    def add_lora(self, y: FloatArray, x: FloatArray, lora: PackedLora, rows: IntArray) -> None:
        add_lora(self, y, x, lora, rows)

    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        out = np.empty_like(x)
        for t in range(len(x)):
            out[t] = _rms_norm(x[t], weight, eps)
        return out

    def add_rms_norm(self, residual: FloatArray, update: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        residual += update
        return self.rms_norm(residual, weight, eps)

    def layer_norm(self, x: FloatArray, weight: FloatArray, bias: FloatArray, eps: float) -> FloatArray:
        out = np.empty_like(x)
        for t in range(len(x)):
            centered = x[t] - np.mean(x[t], dtype=np.float64)
            factor = 1.0 / np.sqrt(np.mean(np.square(centered)) + eps)
            out[t] = centered * factor * weight + bias
        return out

    def add(self, x: FloatArray, update: FloatArray) -> None:
        x += update

    def qk_norm(self, qkv: FloatArray, heads: Heads, q_weight: FloatArray, k_weight: FloatArray, eps: float) -> None:
        q, k, _ = _split_heads(qkv, heads)
        for t in range(len(qkv)):
            q[t] = _rms_norm(q[t], q_weight, eps)
            k[t] = _rms_norm(k[t], k_weight, eps)

    def rope(self, qkv: FloatArray, heads: Heads, positions: IntArray, table: RopeTable) -> None:
        _check_range("position", positions, len(table.cos))
        half = table.cos.shape[1]
        by_axis = positions[:, None] if positions.ndim == 1 else positions
        by_pair = by_axis[:, np.zeros(half, np.int32) if table.axes is None else table.axes]
        cos, sin = (numbers[by_pair, np.arange(half)][:, None] for numbers in (table.cos, table.sin))
        q, k, _ = _split_heads(qkv, heads)
        for part in (q, k):
            match table.style:
                case RopeStyle.HALVES:
                    a, b = part[..., :half], part[..., half : 2 * half]
                case RopeStyle.PAIRS:
                    a, b = part[..., 0 : 2 * half : 2], part[..., 1 : 2 * half : 2]
            a[...], b[...] = a * cos - b * sin, b * cos + a * sin

    def write_kv(self, qkv: FloatArray, heads: Heads, kv: ReferenceKv, layer: int, kv_rows: IntArray) -> None:
        _check_range("store row", kv_rows, kv.num_blocks * kv.block_size)
        _, k, v = _split_heads(qkv, heads)
        kv.keys[layer].reshape(-1, heads.num_kv, heads.head_dim)[kv_rows] = k
        kv.values[layer].reshape(-1, heads.num_kv, heads.head_dim)[kv_rows] = v

    def attention(
        self,
        qkv: FloatArray,
        heads: Heads,
        kv: ReferenceKv,
        layer: int,
        batch: Batch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> FloatArray:
        q, _, _ = _split_heads(qkv, heads)
        out = np.empty((len(qkv), heads.num_q, heads.head_dim), np.float32)
        for span, table in enumerate(batch.block_tables):
            first, last = int(batch.span_starts[span]), int(batch.span_starts[span + 1])
            start = int(batch.context_lens[span])
            keys, values = _gather(kv, layer, table, start + last - first)
            for t in range(first, last):
                # The one tile of a row is everything it sees: its extent follows from the position alone.
                end = start + t - first + 1
                begin = max(0, end - window) if window else 0
                out[t] = _attend(q[t], keys[begin:end], values[begin:end], scale, softcap)
        return out.reshape(len(qkv), heads.num_q * heads.head_dim)

    def gated_activation(self, gate_up: FloatArray, activation: Activation) -> FloatArray:
        width = gate_up.shape[1] // 2
        out = np.empty((len(gate_up), width), np.float32)
        for t in range(len(gate_up)):
            out[t] = _FUNCTIONS[activation](gate_up[t, :width]) * gate_up[t, width:]
        return out

    def activate(self, x: FloatArray, activation: Activation) -> None:
        for row in x:
            row[...] = _FUNCTIONS[activation](row)

    def route(
        self, logits: FloatArray, routing: Routing, bias: FloatArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        _check_routing(routing, logits.shape[1])
        ids = np.empty((len(logits), routing.top_k), np.int32)
        weights = np.empty((len(logits), routing.top_k), np.float32)
        for t in range(len(logits)):
            ids[t], weights[t] = _route(logits[t], routing, bias)
        return ids, weights

    def experts(
        self, x: FloatArray, ids: IntArray, weights: FloatArray, experts: ReferenceExperts, activation: Activation
    ) -> FloatArray:
        _check_range("expert", ids, experts.num_experts)
        out = np.zeros_like(x)
        for t in range(len(x)):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                gate_up = self.linear(x[t : t + 1], experts.gate_up[expert])
                down = self.linear(self.gated_activation(gate_up, activation), experts.down[expert])
                out[t] += weight * down[0]
        return out

    def softcap(self, x: FloatArray, cap: float) -> None:
        for row in x:
            row[...] = _softcap(row, cap)

    def capture(self, build: Callable[[LayerOps], Forward]) -> Forward:
        return build(self)

    # ---- encoders

    def encoder_attention(
        self, qkv: FloatArray, heads: Heads, segment_starts: IntArray, scale: float, softcap: float = 0.0
    ) -> FloatArray:
        starts = segment_starts.tolist()
        if not starts or starts[0] != 0 or starts[-1] != len(qkv) or starts != sorted(starts):
            raise ValueError("segment_starts must ascend from 0 to the number of rows")
        q, k, v = _split_heads(qkv, heads)
        out = np.empty((len(qkv), heads.num_q, heads.head_dim), np.float32)
        for first, last in pairwise(starts):
            for t in range(first, last):
                out[t] = _attend(q[t], k[first:last], v[first:last], scale, softcap)
        return out.reshape(len(qkv), heads.num_q * heads.head_dim)

    # ---- the choice of tokens

    def take_rows(self, x: FloatArray, rows: IntArray) -> FloatArray:
        _check_range("row", rows, len(x))
        return x[rows]

    def edit_logits(self, logits: FloatArray, edits: LogitEdits) -> None:
        reference_sampling.edit_logits(logits, edits)

    def choose(self, logits: FloatArray, controls: ChoiceControls) -> IntArray:
        return reference_sampling.choose(logits, controls)

    def top_logprobs(self, logits: FloatArray, chosen: IntArray, k: int) -> TopLogprobs:
        return reference_sampling.top_logprobs(logits, chosen, k)


def _stack(parts: Sequence[RawTensor]) -> FloatArray:
    arrays = [to_float32(part) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _check_range(what: str, numbers: IntArray, limit: int) -> None:
    if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= limit):
        raise ValueError(f"{what} {int(numbers.min())} .. {int(numbers.max())} is outside 0 .. {limit - 1}")


def _split_heads(qkv: FloatArray, heads: Heads) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Views [T, heads, head_dim] of the queries, keys and values of fused rows."""
    by_head = qkv.reshape(len(qkv), heads.num_q + 2 * heads.num_kv, heads.head_dim)
    return (
        by_head[:, : heads.num_q],
        by_head[:, heads.num_q : heads.num_q + heads.num_kv],
        by_head[:, heads.num_q + heads.num_kv :],
    )


def _rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """Over the last axis of one token's values; the squares are summed in float64."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    factor: FloatArray = (1.0 / np.sqrt(mean + eps)).astype(np.float32)
    return x * factor * weight


def _gather(kv: ReferenceKv, layer: int, table: IntArray, length: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values of positions 0 .. length - 1, each [length, num_kv, head_dim]."""
    count = -(-length // kv.block_size)
    if count > len(table):
        raise ValueError(f"{length} tokens need {count} blocks, but the block table has {len(table)}")
    blocks = table[:count]
    _check_range("block", blocks, kv.num_blocks)
    row = kv.keys.shape[3:]
    return kv.keys[layer][blocks].reshape(-1, *row)[:length], kv.values[layer][blocks].reshape(-1, *row)[:length]


def _attend(q: FloatArray, keys: FloatArray, values: FloatArray, scale: float, softcap: float) -> FloatArray:
    """Queries [num_q, d] of one token over keys and values [n, num_kv, d]: softmax(q k) v, [num_q, d]."""
    num_kv = keys.shape[1]
    grouped = q.reshape(num_kv, len(q) // num_kv, q.shape[1])
    scores = np.matmul(grouped, keys.transpose(1, 2, 0)) * scale
    if softcap:
        scores = _softcap(scores, softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: FloatArray = np.matmul(weights, values.transpose(1, 0, 2)) / weights.sum(axis=-1, keepdims=True)
    return mixed.reshape(q.shape)


def _check_routing(routing: Routing, num_experts: int) -> None:
    if routing.num_groups < 1 or num_experts % routing.num_groups:
        raise ValueError(f"{num_experts} experts do not make {routing.num_groups} groups")
    if not 1 <= routing.top_groups <= routing.num_groups:
        raise ValueError("top_groups must be 1 .. the number of groups")
    choice = num_experts // routing.num_groups * routing.top_groups
    if not 1 <= routing.top_k <= choice:
        raise ValueError(f"top_k must be 1 .. the {choice} experts to choose from")


def _route(logits: FloatArray, routing: Routing, bias: FloatArray | None) -> tuple[IntArray, FloatArray]:
    """Ids and weights of one token."""
    match routing.scoring:
        case Scoring.SOFTMAX:
            masses = np.exp(logits - logits.max())
            scores = masses / masses.sum()
        case Scoring.SIGMOID:
            with np.errstate(over="ignore"):
                scores = 1 / (1 + np.exp(-logits))
    merits = scores if bias is None else scores + bias
    if not np.all(np.isfinite(merits)):
        return np.arange(routing.top_k, dtype=np.int32), np.full(routing.top_k, np.nan, np.float32)
    groups = merits.reshape(routing.num_groups, -1)
    best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1), stable=True)[: routing.top_groups]
    limited = np.full_like(groups, -np.inf)
    limited[best] = groups[best]
    ids = np.argsort(-limited.reshape(-1), stable=True)[: routing.top_k]
    weights = scores[ids]
    if routing.renormalize:
        weights /= weights.sum() + np.float32(1e-20)
    return ids.astype(np.int32), weights * np.float32(routing.scale)


def _softcap(x: FloatArray, cap: float) -> FloatArray:
    capped: FloatArray = np.tanh(x / cap)
    capped *= cap
    return capped


def _silu(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # where exp(-x) overflows, the quotient is 0, as it should be
        denominator: FloatArray = np.exp(-x)
    denominator += 1.0
    return x / denominator


def _gelu_tanh(x: FloatArray) -> FloatArray:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    gate: FloatArray = np.tanh(inner)
    gate += 1.0
    return x * gate * 0.5


def _gelu(x: FloatArray) -> FloatArray:
    # Left of zero 1 + erf would cancel; numpy has neither.
    complement: FloatArray = np.array([math.erfc(-value / math.sqrt(2)) for value in x.tolist()], np.float64)
    return (x * complement * 0.5).astype(np.float32)


def _quick_gelu(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        denominator: FloatArray = np.exp(x * -1.702)
    denominator += 1.0
    return x / denominator


_FUNCTIONS = {
    Activation.SILU: _silu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU: _gelu,
    Activation.QUICK_GELU: _quick_gelu,
}
