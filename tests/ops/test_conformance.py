"""What every implementation of the operations must hold: ``pytest tests/ops/test_conformance.py -k NAME``.

Three kinds of scenario: the formula (against float64 numpy, at sizes around the edges of vectors and tiles), the row
property (a row has the same bits whatever surrounds it) and the span property (attention has the same bits however a
sequence is cut, and wherever its blocks lie).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paceline.ops.api import Activation, KvStore, Ops, RopeStyle, RopeTable, Routing, Scoring
from paceline.tensors import Array, Encoding, FloatArray, Heads, KvLayout, RawLora, RawTensor
from support.batches import Span, make_batch
from support.implementations import Implementation, implementations
from support.raw_tensors import decoded, random_tensor

THREADS = 2

LINEAR_ERROR = {"f32": 1e-6, "f16": 1e-6, "bf16": 6e-3, "int8-g32": 8e-3, "int4-g32": 8e-3}
"""Error of a linear layer's products by the form of its weights, as the standard deviation relative to a product.

bf16 has 8 significant bits, for weights and possibly for activations; the integer forms round most groups of 32
activations to 8 bits of the largest.
"""
STORED_ANEW = {Encoding.Q4_K: 2e-3, Encoding.Q5_0: 2e-2, Encoding.Q5_1: 2e-2, Encoding.Q5_K: 2e-2, Encoding.Q6_K: 2e-2}
"""Encodings that an implementation may round to one of the integer forms, with the error of that."""

EDGES = (1, 15, 16, 17, 31, 32, 33, 64, 65)
BLOCK_ENCODINGS = [e for e in Encoding if e.block_elements > 1]


@pytest.fixture(params=implementations(), ids=lambda implementation: implementation.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


@pytest.fixture
def ops(implementation: Implementation) -> Ops:
    return implementation.make(THREADS)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, np.float32)


def assert_close(actual: Array, expected: Array, error: float, size: Array | None = None) -> None:
    """Within ``error`` of ``size``: by default the largest number of each row."""
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    if expected.size:
        size = np.abs(expected).max(axis=-1, keepdims=True) if size is None else size
        assert np.all(np.abs(actual - expected) <= error * size + 1e-30)


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert actual.dtype == expected.dtype
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


# ---- formulas in float64


def rms_norm_formula(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def attention_formula(q: Array, k: Array, v: Array, scale: float, window: int, softcap: float) -> Array:
    """One sequence, dense: [T, num_q, d], [T, num_kv, d] twice -> [T, num_q * d]."""
    distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    return softmax_formula(q, k, v, (distance >= 0) & ((distance < window) if window else True), scale, softcap)


def softmax_formula(q: Array, k: Array, v: Array, visible: Array, scale: float, softcap: float) -> Array:
    """``visible`` [T, T] says which keys each query sees."""
    q, k, v = (part.astype(np.float64) for part in (q, k, v))
    k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def split_heads(qkv: FloatArray, heads: Heads) -> tuple[Array, Array, Array]:
    by_head = qkv.reshape(len(qkv), -1, heads.head_dim)
    return tuple(np.split(by_head, [heads.num_q, heads.num_q + heads.num_kv], axis=1))  # type: ignore[return-value]


def rope_table(rng: np.random.Generator, positions: int, dim: int, style: RopeStyle) -> RopeTable:
    angles = rng.uniform(-math.pi, math.pi, (positions, dim // 2))
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), style)


# ---- linear layers


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 33, 64, 65])
def test_linear_is_the_product_with_the_decoded_weights(
    ops: Ops, rng: np.random.Generator, encoding: Encoding, num_outputs: int
) -> None:
    for num_inputs in (256, 512) if encoding.block_elements == 256 else (32, 64, 96, 288):
        raw = random_tensor((num_outputs, num_inputs), encoding, rng)
        x = normal(rng, 5, num_inputs)
        packed = ops.pack_linear([raw])
        assert (packed.num_outputs, packed.num_inputs) == (num_outputs, num_inputs)
        assert packed.nbytes > 0
        anew = 0.0 if packed.form == "f32" else STORED_ANEW.get(encoding, 0.0)
        assert_linear(ops.linear(x, packed), x, decoded(raw), max(LINEAR_ERROR[packed.form], anew))


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.F16, Encoding.BF16], ids=lambda e: e.label)
@pytest.mark.parametrize("num_inputs", [*EDGES, 127, 129])
def test_linear_takes_any_number_of_inputs(
    ops: Ops, rng: np.random.Generator, encoding: Encoding, num_inputs: int
) -> None:
    raw = random_tensor((18, num_inputs), encoding, rng)
    x = normal(rng, 3, num_inputs)
    packed = ops.pack_linear([raw])
    assert_linear(ops.linear(x, packed), x, decoded(raw), LINEAR_ERROR[packed.form])


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_1], ids=lambda e: e.label)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33])
def test_linear_takes_any_number_of_rows(ops: Ops, rng: np.random.Generator, encoding: Encoding, num_rows: int) -> None:
    raw = random_tensor((40, 64), encoding, rng)
    x = normal(rng, num_rows, 64)
    packed = ops.pack_linear([raw])
    out = ops.linear(x, packed)
    assert out.shape == (num_rows, 40)
    assert_linear(out, x, decoded(raw), LINEAR_ERROR[packed.form])


def assert_linear(actual: Array, x: Array, weight: Array, error: float) -> None:
    """Within five standard deviations of a sum of independently rounded products."""
    assert actual.dtype == np.float32
    exact = x.astype(np.float64) @ weight.T
    assert actual.shape == exact.shape
    norms = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) * np.linalg.norm(weight, axis=1)
    assert np.all(np.abs(actual - exact) <= error * (5 * norms / math.sqrt(weight.shape[1]) + np.abs(exact)))


def test_stacked_matrices_give_the_outputs_of_each_side_by_side(ops: Ops, rng: np.random.Generator) -> None:
    for encoding in (Encoding.F32, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1, Encoding.Q6_K):
        parts = [random_tensor((n, 256), encoding, rng) for n in (48, 16, 17)]
        x = normal(rng, 4, 256)
        apart = [ops.linear(x, ops.pack_linear([part])) for part in parts]
        assert_same_bits(ops.linear(x, ops.pack_linear(parts)), np.concatenate(apart, axis=1))


def test_matrices_of_different_encodings_can_be_stacked(ops: Ops, rng: np.random.Generator) -> None:
    """As in mixed GGUF files, where values often have more bits than queries and keys."""
    for encodings in ((Encoding.Q4_K, Encoding.Q4_K, Encoding.Q6_K), (Encoding.Q4_1, Encoding.Q8_0, Encoding.F32)):
        parts = [random_tensor((24, 256), encoding, rng) for encoding in encodings]
        x = normal(rng, 4, 256)
        packed = ops.pack_linear(parts)
        weight = np.concatenate([decoded(part) for part in parts])
        assert_linear(ops.linear(x, packed), x, weight, max(STORED_ANEW.values()))


def test_biases_are_added_last(ops: Ops, rng: np.random.Generator) -> None:
    for encoding in (Encoding.F32, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_1):
        parts = [random_tensor((n, 64), encoding, rng) for n in (48, 17)]
        biases = [random_tensor((n,), Encoding.F32, rng) for n in (48, 17)]
        x = normal(rng, 4, 64)
        plain = ops.linear(x, ops.pack_linear(parts))
        bias = np.concatenate([decoded(b) for b in biases]).astype(np.float32)
        assert_same_bits(ops.linear(x, ops.pack_linear(parts, biases)), plain + bias)


def test_matrices_of_different_widths_cannot_be_stacked(ops: Ops, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="inputs"):
        ops.pack_linear([random_tensor((4, 32), Encoding.F32, rng), random_tensor((4, 64), Encoding.F32, rng)])


def test_biases_must_match_the_outputs(ops: Ops, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="bias"):
        ops.pack_linear([random_tensor((4, 32), Encoding.F32, rng)], [random_tensor((5,), Encoding.F32, rng)])


# ---- low-rank updates


def random_lora(rng: np.random.Generator, ranks: tuple[int, ...], encoding: Encoding = Encoding.F32) -> list[RawLora]:
    """Updates of 24, 8 and 17 outputs of a layer of 96 inputs, with outputs between them that are left alone."""
    shapes = zip((0, 30, 40), (24, 8, 17), ranks)
    return [
        RawLora(first, random_tensor((r, 96), encoding, rng), random_tensor((n, r), encoding, rng), 0.3 + first)
        for first, n, r in shapes
    ]


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.F16, Encoding.BF16], ids=lambda e: e.label)
@pytest.mark.parametrize("ranks", [(1,), (8, 8, 8), (16, 3), (33, 1, 64)], ids=str)
def test_add_lora_adds_what_the_update_makes_of_its_rows(
    ops: Ops, rng: np.random.Generator, ranks: tuple[int, ...], encoding: Encoding
) -> None:
    updates = random_lora(rng, ranks, encoding)
    lora = ops.pack_lora(updates)
    assert lora.nbytes >= sum(u.down.data.nbytes + u.up.data.nbytes for u in updates)
    x, before = normal(rng, 7, 96), normal(rng, 7, 60)
    rows = np.array([1, 2, 5], np.int32)
    after = before.copy()
    ops.add_lora(after, x, lora, rows)
    expected = before.astype(np.float64)
    for update in updates:
        delta = x[rows].astype(np.float64) @ decoded(update.down).T @ decoded(update.up).T
        expected[rows, update.first : update.first + len(decoded(update.up))] += update.scale * delta
    assert_close(after, expected, 2e-2 if encoding is Encoding.BF16 else 2e-6)
    untouched = np.ones_like(before, bool)
    for update in updates:
        untouched[rows, update.first : update.first + len(decoded(update.up))] = False
    assert_same_bits(after[untouched], before[untouched])


def test_the_order_of_a_low_rank_update_is_stated(ops: Ops, rng: np.random.Generator) -> None:
    """The linear layers' own chains, with one rounding for the scale and one for the sum."""
    [update] = random_lora(rng, (12,))
    x, before = normal(rng, 5, 96), normal(rng, 5, 60)
    z = ops.linear(x, ops.pack_linear([update.down])) * np.float32(update.scale)
    expected = before.copy()
    expected[:, :24] += ops.linear(z, ops.pack_linear([update.up]))
    ops.add_lora(before, x, ops.pack_lora([update]), np.arange(5, dtype=np.int32))
    assert_same_bits(before, expected)


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.BF16], ids=lambda e: e.label)
def test_a_low_rank_update_of_a_row_does_not_depend_on_the_others(
    ops: Ops, rng: np.random.Generator, encoding: Encoding
) -> None:
    lora = ops.pack_lora(random_lora(rng, (8, 16, 5), encoding))
    x, before = normal(rng, 70, 96), normal(rng, 70, 60)
    whole = before.copy()
    ops.add_lora(whole, x, lora, np.arange(70, dtype=np.int32))
    for rows in ([3], [0, 1], list(range(17)), list(range(5, 70, 3))):
        some = before.copy()
        ops.add_lora(some, x, lora, np.array(rows, np.int32))
        assert_same_bits(some[rows], whole[rows])


def test_add_lora_leaves_the_sign_of_other_rows_zeros(ops: Ops, rng: np.random.Generator) -> None:
    """To add a zero to every row would not: -0 + 0 is 0."""
    lora = ops.pack_lora(random_lora(rng, (4,)))
    y = np.full((3, 60), -0.0, np.float32)
    ops.add_lora(y, normal(rng, 3, 96), lora, np.array([1], np.int32))
    assert np.signbit(y[[0, 2]]).all()
    assert not np.signbit(y[1, :24]).all()
    ops.add_lora(y, normal(rng, 3, 96), lora, np.empty(0, np.int32))


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_add_lora_refuses_rows_that_are_not_there(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    lora = ops.pack_lora(random_lora(rng, (4,)))
    y = normal(rng, 3, 60)
    before = y.copy()
    with pytest.raises(ValueError, match=str(bad)):
        ops.add_lora(y, normal(rng, 3, 96), lora, np.array([0, bad], np.int32))
    assert_same_bits(y, before)


def test_halves_of_a_low_rank_update_must_have_the_same_rank(ops: Ops, rng: np.random.Generator) -> None:
    [update] = random_lora(rng, (4,))
    with pytest.raises(ValueError, match="4 inputs, but"):
        ops.pack_lora([replace(update, down=random_tensor((5, 96), Encoding.F32, rng))])


# ---- token vectors, norms, rotation, activations


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
def test_embed_gives_the_decoded_rows_times_the_scale(ops: Ops, rng: np.random.Generator, encoding: Encoding) -> None:
    raw = random_tensor((11, 256), encoding, rng)
    table = ops.pack_embedding(raw)
    assert (table.num_rows, table.width) == (11, 256)
    ids = np.array([3, 0, 10, 3], np.int32)
    rows = decoded(raw).astype(np.float32)[ids]
    assert_same_bits(ops.embed(ids, table), rows)
    assert_same_bits(ops.embed(ids, table, 1.7), rows * np.float32(1.7))
    assert ops.embed(ids[:0], table).shape == (0, 256)


@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_embed_refuses_ids_outside_the_table(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    table = ops.pack_embedding(random_tensor((11, 32), Encoding.Q8_0, rng))
    with pytest.raises(ValueError, match=str(bad)):
        ops.embed(np.array([0, bad], np.int32), table)


def test_vector_decodes_and_adds_the_offset(ops: Ops, rng: np.random.Generator) -> None:
    for encoding in (Encoding.F32, Encoding.F16, Encoding.BF16):
        raw = random_tensor((33,), encoding, rng)
        exact = decoded(raw).astype(np.float32)
        assert_same_bits(ops.vector(raw), exact)
        assert_same_bits(ops.vector(raw, 1.0), exact + np.float32(1))


@pytest.mark.parametrize("width", [*EDGES, 127, 129, 576, 2049])
def test_rms_norm_follows_its_formula(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, width: int
) -> None:
    x, weight = normal(rng, 3, width) * np.float32([[1e-4], [1], [1e4]]), normal(rng, width)
    for eps in (1e-6, 1e-5):
        assert_close(ops.rms_norm(x, weight, eps), rms_norm_formula(x, weight, eps), implementation.error)
    assert ops.rms_norm(x[:0], weight, 1e-6).shape == (0, width)


def test_rms_norm_of_zeros_is_zero(ops: Ops) -> None:
    assert np.all(ops.rms_norm(np.zeros((2, 48), np.float32), np.ones(48, np.float32), 1e-6) == 0)


@pytest.mark.parametrize("width", [17, 64, 576])
def test_add_rms_norm_adds_in_place_and_norms_the_sum(ops: Ops, rng: np.random.Generator, width: int) -> None:
    residual, update, weight = normal(rng, 4, width), normal(rng, 4, width), normal(rng, width)
    total, kept_update = residual + update, update.copy()
    normed = ops.add_rms_norm(residual, update, weight, 1e-6)
    assert_same_bits(residual, total)
    assert_same_bits(update, kept_update)
    assert_same_bits(normed, ops.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("width", [*EDGES, 127, 129, 576, 1153])
def test_layer_norm_follows_its_formula(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, width: int
) -> None:
    x, weight, bias = (
        normal(rng, 4, width) * np.float32([[1e-4], [1], [1e4], [1]]),
        normal(rng, width),
        normal(rng, width),
    )
    x[3] += 10  # a mean that outweighs the spread
    exact = x.astype(np.float64)
    centered = exact - exact.mean(axis=1, keepdims=True)
    for eps in (1e-6, 1e-5):
        expected = centered / np.sqrt(np.mean(centered**2, axis=1, keepdims=True) + eps) * weight + bias
        out = ops.layer_norm(x, weight, bias, eps)
        assert_close(out[:3], expected[:3], 3 * implementation.error)
        assert_close(out[3:], expected[3:], 30 * implementation.error)
    assert ops.layer_norm(x[:0], weight, bias, 1e-6).shape == (0, width)


def test_layer_norm_of_a_constant_is_the_bias(ops: Ops, rng: np.random.Generator) -> None:
    bias = normal(rng, 48)
    assert_same_bits(ops.layer_norm(np.full((1, 48), 3, np.float32), np.ones(48, np.float32), bias, 1e-6)[0], bias)


@pytest.mark.parametrize("width", [17, 64, 576])
def test_add_adds_in_place(ops: Ops, rng: np.random.Generator, width: int) -> None:
    x, update = normal(rng, 4, width), normal(rng, 4, width)
    total, kept_update = x + update, update.copy()
    ops.add(x, update)
    assert_same_bits(x, total)
    assert_same_bits(update, kept_update)


@pytest.mark.parametrize("heads", [Heads(1, 1, 32), Heads(9, 3, 64), Heads(4, 1, 80), Heads(2, 2, 256)], ids=str)
def test_qk_norm_norms_each_query_and_key_head(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, heads: Heads
) -> None:
    qkv, q_weight, k_weight = normal(rng, 5, heads.row), normal(rng, heads.head_dim), normal(rng, heads.head_dim)
    q, k, v = (part.copy() for part in split_heads(qkv, heads))
    ops.qk_norm(qkv, heads, q_weight, k_weight, 1e-6)
    new_q, new_k, new_v = split_heads(qkv, heads)
    assert_close(new_q, rms_norm_formula(q, q_weight, 1e-6), implementation.error)
    assert_close(new_k, rms_norm_formula(k, k_weight, 1e-6), implementation.error)
    assert_same_bits(np.ascontiguousarray(new_v), v)


@pytest.mark.parametrize("style", list(RopeStyle), ids=lambda s: s.value)
@pytest.mark.parametrize(("heads", "dim"), [(Heads(3, 1, 32), 32), (Heads(9, 3, 64), 64), (Heads(2, 2, 80), 20)])
def test_rope_rotates_with_every_product_rounded(
    ops: Ops, rng: np.random.Generator, style: RopeStyle, heads: Heads, dim: int
) -> None:
    table = rope_table(rng, 40, dim, style)
    positions = np.array([0, 39, 7, 7, 1], np.int32)
    qkv = normal(rng, len(positions), heads.row)
    expected = qkv.copy()
    first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if style is RopeStyle.HALVES else (
        slice(0, dim, 2), slice(1, dim, 2))  # fmt: skip
    for t, position in enumerate(positions):
        cos, sin = table.cos[position], table.sin[position]
        for head in expected[t].reshape(-1, heads.head_dim)[: heads.num_q + heads.num_kv]:
            a, b = head[first].copy(), head[second].copy()
            head[first], head[second] = a * cos - b * sin, b * cos + a * sin
    ops.rope(qkv, heads, positions, table)
    assert_same_bits(qkv, expected)


@pytest.mark.parametrize("style", list(RopeStyle), ids=lambda s: s.value)
@pytest.mark.parametrize(("heads", "dim"), [(Heads(2, 1, 32), 32), (Heads(2, 2, 80), 20), (Heads(2, 1, 192), 192)])
def test_rope_turns_each_pair_by_its_axis(
    ops: Ops, rng: np.random.Generator, style: RopeStyle, heads: Heads, dim: int
) -> None:
    """As if each token had a row of the table for itself, put together from those of its positions."""
    table = rope_table(rng, 40, dim, style)
    positions, axes = rng.integers(0, 40, (7, 3), np.int32), rng.integers(0, 3, dim // 2, np.int32)
    axes[0] = 2
    own = positions[:, axes], np.arange(dim // 2)
    qkv = normal(rng, 7, heads.row)
    expected = qkv.copy()
    rows = RopeTable(np.ascontiguousarray(table.cos[own]), np.ascontiguousarray(table.sin[own]), style)
    ops.rope(expected, heads, np.arange(7, dtype=np.int32), rows)
    ops.rope(qkv, heads, positions, replace(table, axes=axes))
    assert_same_bits(qkv, expected)


@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1])
def test_rope_refuses_positions_outside_its_table(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    heads, table = Heads(2, 1, 32), rope_table(rng, 40, 32, RopeStyle.HALVES)
    by_axis = replace(table, axes=np.repeat(np.int32([0, 1]), 8))
    for wrong, rotation in ((np.int32([0, bad]), table), (np.int32([[0, 1], [0, bad]]), by_axis)):
        with pytest.raises(ValueError, match=str(bad)):
            ops.rope(normal(rng, 2, heads.row), heads, wrong, rotation)


@pytest.mark.parametrize("width", EDGES)
def test_gated_activations_follow_their_formulas(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, width: int
) -> None:
    gate_up = normal(rng, 4, 2 * width) * np.float32([[1e-3], [1], [4], [30]])
    gate, up = (part.astype(np.float64) for part in np.split(gate_up, 2, axis=1))
    silu = gate / (1 + np.exp(-gate)) * up
    assert_close(ops.gated_activation(gate_up, Activation.SILU), silu, implementation.error, np.abs(gate * up))
    gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    assert_close(ops.gated_activation(gate_up, Activation.GELU_TANH), gelu, implementation.error, np.abs(gate * up))
    phi = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in gate.reshape(-1)]).reshape(gate.shape)
    exact = gate * phi * up
    assert_close(ops.gated_activation(gate_up, Activation.GELU), exact, implementation.error, np.abs(gate * up))
    quick = gate / (1 + np.exp(-1.702 * gate)) * up
    assert_close(ops.gated_activation(gate_up, Activation.QUICK_GELU), quick, implementation.error, np.abs(gate * up))
    assert ops.gated_activation(gate_up[:0], Activation.SILU).shape == (0, width)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
@pytest.mark.parametrize("width", EDGES)
def test_an_activation_by_itself_is_one_that_gates_ones(
    ops: Ops, rng: np.random.Generator, activation: Activation, width: int
) -> None:
    x = normal(rng, 3, width) * 3
    gated = ops.gated_activation(np.concatenate([x, np.ones_like(x)], axis=1), activation)
    ops.activate(x, activation)
    assert_same_bits(x, gated)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.value)
def test_gates_far_from_zero_are_open_or_shut(ops: Ops, activation: Activation) -> None:
    gate_up = np.repeat(np.float32([[-1000, -100, 0, 100, 1000, 1, 1, 1, 1, 1]]), 2, axis=0)
    out = ops.gated_activation(gate_up, activation)
    assert np.allclose(out, [0, 0, 0, 100, 1000], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("width", [*EDGES, 1000])
def test_softcap_follows_its_formula_in_place(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, width: int
) -> None:
    x = normal(rng, 3, width) * np.float32([[0.1], [10], [1000]])
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    ops.softcap(x, 30.0)
    assert_close(x, expected, implementation.error)


# ---- the choice of experts


def routing_formula(logits: Array, routing: Routing, bias: Array | None) -> tuple[Array, Array, Array]:
    """Ids, weights, and by how much each choice was made: by the definition, in float64, without any sorting."""
    scores = logits.astype(np.float64)
    if routing.scoring is Scoring.SOFTMAX:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-scores))
    merits = scores if bias is None else scores + bias
    size = merits.shape[1] // routing.num_groups
    ids, weights, margins = [], [], []
    for score, merit in zip(scores, merits, strict=True):
        groups = [sum(sorted(merit[g : g + size])[-2:]) for g in range(0, len(merit), size)]
        allowed, margin = np.zeros(len(merit), bool), math.inf
        for _ in range(routing.top_groups):
            best = int(np.argmax(groups))
            allowed[best * size : (best + 1) * size] = True
            taken, groups[best] = groups[best], -math.inf
            margin = min(margin, taken - max(groups))
        left, row = np.where(allowed, merit, -math.inf), []
        for _ in range(routing.top_k):
            row.append(int(np.argmax(left)))
            taken, left[row[-1]] = left[row[-1]], -math.inf
            margin = min(margin, taken - left.max())
        chosen = score[row]
        ids.append(row)
        weights.append((chosen / chosen.sum() if routing.renormalize else chosen) * routing.scale)
        margins.append(margin)
    return np.array(ids, np.int32), np.array(weights), np.array(margins)


ROUTINGS = {
    "mixtral": (8, Routing(2, Scoring.SOFTMAX, renormalize=True), False),
    "qwen3": (128, Routing(8, Scoring.SOFTMAX, renormalize=True), False),
    "qwen-plain": (60, Routing(4, Scoring.SOFTMAX, renormalize=False), False),
    "ernie": (64, Routing(6, Scoring.SOFTMAX, renormalize=True), True),
    "deepseek": (256, Routing(8, Scoring.SIGMOID, renormalize=True, scale=2.5, num_groups=8, top_groups=4), True),
    "glm": (128, Routing(8, Scoring.SIGMOID, renormalize=True), True),
    "odd": (33, Routing(3, Scoring.SIGMOID, renormalize=False, scale=0.5, num_groups=3, top_groups=2), True),
    "groups-of-one": (7, Routing(2, Scoring.SOFTMAX, renormalize=True, num_groups=7, top_groups=3), False),
    "all": (5, Routing(5, Scoring.SOFTMAX, renormalize=True), False),
    "one": (1, Routing(1, Scoring.SIGMOID, renormalize=False), False),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_follows_its_definition(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, name: str
) -> None:
    num_experts, routing, biased = ROUTINGS[name]
    logits = normal(rng, 40, num_experts) * 2
    bias = normal(rng, num_experts) * np.float32(0.1) if biased else None
    ids, weights = ops.route(logits, routing, bias)
    expected_ids, expected_weights, margins = routing_formula(logits, routing, bias)
    assert ids.dtype == np.int32
    clear = margins > 1e-5
    assert clear.sum() > 20
    assert ids[clear].tolist() == expected_ids[clear].tolist()
    assert_close(weights[clear], expected_weights[clear], implementation.error)
    none, nothing = ops.route(logits[:0], routing, bias)
    assert none.shape == nothing.shape == (0, routing.top_k)


def test_ties_between_experts_and_groups_go_to_the_smaller_id(ops: Ops) -> None:
    logits = np.zeros((2, 24), np.float32)
    logits[1, [5, 9, 17, 23]] = 1
    plain = Routing(3, Scoring.SIGMOID, renormalize=False)
    assert ops.route(logits, plain)[0].tolist() == [[0, 1, 2], [5, 9, 17]]
    grouped = Routing(5, Scoring.SOFTMAX, renormalize=False, num_groups=6, top_groups=2)
    assert ops.route(logits, grouped)[0].tolist() == [[0, 1, 2, 3, 4], [5, 9, 4, 6, 7]]


def test_a_bias_chooses_but_does_not_weigh(ops: Ops) -> None:
    logits = np.float32([[0, 1, 2, 3]])
    bias = np.float32([10, 5, 0, 0])
    routing = Routing(2, Scoring.SIGMOID, renormalize=False)
    ids, weights = ops.route(logits, routing, bias)
    assert ids.tolist() == [[0, 1]]
    assert np.allclose(weights, 1 / (1 + np.exp(-logits[:, :2])))


@pytest.mark.parametrize("scoring", list(Scoring), ids=lambda s: s.value)
def test_logits_that_are_not_numbers_give_legal_ids_without_weights(ops: Ops, scoring: Scoring) -> None:
    logits = np.zeros((3, 19), np.float32)
    logits[1, 18] = np.nan
    with np.errstate(invalid="ignore"):
        ids, weights = ops.route(logits, Routing(2, scoring, renormalize=True))
    assert ids.tolist() == [[0, 1]] * 3
    assert np.isnan(weights).all(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(0, Scoring.SOFTMAX, renormalize=True), r"top_k must be 1 \.\. the 12"),
        (Routing(13, Scoring.SOFTMAX, renormalize=True), r"top_k must be 1 \.\. the 12"),
        (Routing(5, Scoring.SOFTMAX, renormalize=True, num_groups=3, top_groups=1), r"top_k must be 1 \.\. the 4"),
        (Routing(1, Scoring.SOFTMAX, renormalize=True, num_groups=5), "12 experts do not make 5 groups"),
        (Routing(1, Scoring.SOFTMAX, renormalize=True, num_groups=0), "12 experts do not make 0 groups"),
        (Routing(1, Scoring.SOFTMAX, renormalize=True, num_groups=3, top_groups=4), "top_groups"),
    ],
)
def test_a_routing_that_does_not_fit_its_experts_is_refused(ops: Ops, routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.route(np.zeros((1, 12), np.float32), routing)


@dataclass(frozen=True)
class ExpertTensors:
    gate_up: list[list[RawTensor]]
    down: list[RawTensor]


def expert_tensors(
    rng: np.random.Generator, count: int, width: int, hidden: int, *encodings: Encoding
) -> ExpertTensors:
    """Gate, up and down of each expert in the given encodings."""
    gate, up, down = encodings
    return ExpertTensors(
        [[random_tensor((hidden, width), e, rng) for e in (gate, up)] for _ in range(count)],
        [random_tensor((width, hidden), down, rng) for _ in range(count)],
    )


def random_choice(rng: np.random.Generator, rows: int, top_k: int, num_experts: int) -> tuple[Array, FloatArray]:
    """Distinct experts for each row. The weights are powers of two, so that no product with them is rounded."""
    ids = [rng.permutation(num_experts)[:top_k] for _ in range(rows)]
    weights = np.float32(0.5) ** rng.integers(0, 4, (rows, top_k)).astype(np.float32)
    return np.array(ids, np.int32).reshape(rows, top_k), weights


def one_by_one(
    ops: Ops, tensors: ExpertTensors, x: FloatArray, ids: Array, weights: FloatArray, activation: Activation
) -> FloatArray:
    """The experts' layers on single rows, and the sum in the order of the choice."""
    layers = [
        (ops.pack_linear(up), ops.pack_linear([down])) for up, down in zip(tensors.gate_up, tensors.down, strict=True)
    ]
    out = np.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            gate_up = ops.linear(x[t : t + 1], layers[expert][0])
            out[t] += weight * ops.linear(ops.gated_activation(gate_up, activation), layers[expert][1])[0]
    return out


EXPERT_CASES = [
    *((70, 37, encoding, encoding, encoding) for encoding in (Encoding.F32, Encoding.F16, Encoding.BF16)),
    *((96, 64, encoding, encoding, encoding) for encoding in (Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1)),
    (256, 512, Encoding.Q4_K, Encoding.Q4_K, Encoding.Q6_K),
    (256, 32, Encoding.Q4_K, Encoding.Q6_K, Encoding.BF16),
    (32, 32, Encoding.BF16, Encoding.Q4_1, Encoding.Q8_0),
]


@pytest.mark.parametrize("case", EXPERT_CASES, ids=str)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH], ids=lambda a: a.value)
def test_experts_have_the_bits_of_their_layers_on_single_rows(
    ops: Ops, rng: np.random.Generator, case: tuple[int, int, Encoding, Encoding, Encoding], activation: Activation
) -> None:
    width, hidden, *encodings = case
    tensors = expert_tensors(rng, 5, width, hidden, *encodings)
    experts = ops.pack_experts(tensors.gate_up, tensors.down)
    assert (experts.num_experts, experts.width) == (5, width)
    assert experts.nbytes > 0
    for rows, top_k in ((0, 2), (1, 1), (1, 5), (2, 2), (33, 3), (70, 2)):
        x = normal(rng, rows, width)
        ids, weights = random_choice(rng, rows, top_k, 5)
        kept = x.copy()
        out = ops.experts(x, ids, weights, experts, activation)
        assert_same_bits(out, one_by_one(ops, tensors, x, ids, weights, activation))
        assert_same_bits(x, kept)


@pytest.mark.parametrize("encoding", [Encoding.BF16, Encoding.Q4_1], ids=lambda e: e.label)
def test_all_rows_may_choose_the_same_experts(ops: Ops, rng: np.random.Generator, encoding: Encoding) -> None:
    """Those that nobody chooses are never read: their weights are NaN."""
    tensors = expert_tensors(rng, 6, 64, 32, encoding, encoding, encoding)
    nans = random_tensor((64, 64), Encoding.F32, rng)
    nans.data.view(np.float32)[:] = np.nan
    for e in (0, 2, 5):
        tensors.gate_up[e] = [nans]
    experts = ops.pack_experts(tensors.gate_up, tensors.down)
    x = normal(rng, 205, 64)
    for chosen in ([3], [4, 1]):
        ids = np.tile(np.int32(chosen), (205, 1))
        weights = np.tile(np.float32([1, 0.5])[: len(chosen)], (205, 1))
        expected = one_by_one(ops, tensors, x, ids, weights, Activation.SILU)
        assert np.all(np.isfinite(expected))
        assert_same_bits(ops.experts(x, ids, weights, experts, Activation.SILU), expected)


def test_experts_come_from_stacked_tensors_too(ops: Ops, rng: np.random.Generator) -> None:
    stacks = [random_tensor(shape, Encoding.Q4_1, rng) for shape in ((4, 32, 64), (4, 32, 64), (4, 64, 32))]
    parts = [[stack.matrix(e) for stack in stacks] for e in range(4)]
    for stack, matrices in zip(stacks, zip(*parts, strict=True), strict=True):
        assert np.array_equal(np.stack([decoded(matrix) for matrix in matrices]), decoded(stack))
    experts = ops.pack_experts([part[:2] for part in parts], [part[2] for part in parts])
    assert experts.num_experts == 4


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1])
def test_experts_that_are_not_there_are_refused(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    tensors = expert_tensors(rng, 3, 32, 32, *[Encoding.F32] * 3)
    experts = ops.pack_experts(tensors.gate_up, tensors.down)
    ids, weights = np.int32([[0, 1], [2, bad]]), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=str(bad)):
        ops.experts(normal(rng, 2, 32), ids, weights, experts, Activation.SILU)


def test_experts_that_do_not_fit_together_are_refused(ops: Ops, rng: np.random.Generator) -> None:
    tensors, others = (expert_tensors(rng, 2, 32, hidden, *[Encoding.F32] * 3) for hidden in (32, 48))
    for gate_up, down in (
        (tensors.gate_up, others.down),
        (tensors.gate_up + others.gate_up, tensors.down + others.down),
        (tensors.gate_up, tensors.down[:1]),
        ([], []),
    ):
        with pytest.raises(ValueError, match=r"fit together|as many|shorter|longer"):
            ops.pack_experts(gate_up, down)


def test_take_rows_copies_rows_in_the_order_asked_for(ops: Ops, rng: np.random.Generator) -> None:
    x = normal(rng, 6, 33)
    rows = np.array([5, 0, 0, 3], np.int32)
    assert_same_bits(ops.take_rows(x, rows), x[rows])
    assert ops.take_rows(x, rows[:0]).shape == (0, 33)
    for bad in (-1, 6):
        with pytest.raises(ValueError, match=str(bad)):
            ops.take_rows(x, np.array([bad], np.int32))


# ---- keys, values, attention


@dataclass(frozen=True)
class AttentionCase:
    heads: Heads
    length: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block_size)

    def __str__(self) -> str:
        h = self.heads
        return f"{h.num_q}q{h.num_kv}kv{h.head_dim}d-n{self.length}-b{self.block_size}-w{self.window}-c{self.softcap}"


ATTENTION_CASES = [
    *(AttentionCase(Heads(4, 2, 32), length) for length in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129, 200)),
    *(AttentionCase(Heads(2, 1, dim), 70) for dim in (32, 48, 64, 80, 96, 128, 192, 256)),
    *(AttentionCase(Heads(*heads, 64), 70) for heads in ((1, 1), (3, 3), (9, 3), (8, 1), (14, 2))),
    *(AttentionCase(Heads(4, 2, 32), 75, block_size) for block_size in (1, 7, 32, 64, 128)),
    *(AttentionCase(Heads(4, 2, 64), 140, 32, window) for window in (1, 2, 16, 63, 64, 65, 139, 140, 500)),
    AttentionCase(Heads(4, 2, 64), 100, 32, 0, 5.0),
    AttentionCase(Heads(4, 1, 256), 100, 32, 33, 50.0),
]


@pytest.fixture(params=ATTENTION_CASES, ids=str)
def case(request: pytest.FixtureRequest) -> AttentionCase:
    return request.param


def make_poisoned_kv(ops: Ops, heads: Heads, num_blocks: int, block_size: int, layers: int = 1) -> KvStore:
    """A store in which every row that the test does not write is NaN."""
    kv = ops.make_kv(KvLayout(layers, heads.num_kv, heads.head_dim), num_blocks, block_size)
    nans = np.full((num_blocks * block_size, heads.row), np.nan, np.float32)
    for layer in range(layers):
        ops.write_kv(nans, heads, kv, layer, np.arange(len(nans), dtype=np.int32))
    return kv


def attend(ops: Ops, case: AttentionCase, qkv: FloatArray, kv: KvStore, table: list[int], cuts: list[int]) -> Array:
    """The sequence computed span by span, cut before the given positions."""
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, len(qkv)], strict=True):
        batch = make_batch([Span(table, start, end - start)], case.block_size)
        rows = np.ascontiguousarray(qkv[start:end])
        ops.write_kv(rows, case.heads, kv, 0, batch.kv_rows)
        outputs.append(ops.attention(rows, case.heads, kv, 0, batch, case.scale, case.window, case.softcap))
    return np.concatenate(outputs)


def whole(ops: Ops, case: AttentionCase, qkv: FloatArray) -> Array:
    kv = make_poisoned_kv(ops, case.heads, case.num_blocks, case.block_size)
    return attend(ops, case, qkv, kv, list(range(case.num_blocks)), [])


def test_attention_follows_its_formula(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, case: AttentionCase
) -> None:
    qkv = normal(rng, case.length, case.heads.row)
    expected = attention_formula(*split_heads(qkv, case.heads), case.scale, case.window, case.softcap)
    assert_close(whole(ops, case, qkv), expected, 4 * implementation.error + 4 * implementation.kv_error)


def test_attention_does_not_depend_on_how_the_sequence_is_cut(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, case: AttentionCase
) -> None:
    qkv = normal(rng, case.length, case.heads.row)
    expected = whole(ops, case, qkv)
    one_thread = implementation.make(1)
    for trial in range(4):
        count = case.length - 1 if trial == 0 else int(rng.integers(0, case.length))
        cuts = sorted(rng.choice(np.arange(1, case.length), count, replace=False).tolist()) if case.length > 1 else []
        kv = make_poisoned_kv(ops, case.heads, case.num_blocks + 3, case.block_size)
        table = rng.permutation(case.num_blocks + 3)[: case.num_blocks].tolist()
        assert_same_bits(attend((ops, one_thread)[trial % 2], case, qkv, kv, table, cuts), expected)


def test_attention_does_not_depend_on_batch_mates(ops: Ops, rng: np.random.Generator) -> None:
    """Three sequences in one batch, in every order; another one is NaN throughout."""
    case = AttentionCase(Heads(6, 2, 64), 0, 16, 0, 0.0)
    lengths, starts = [70, 33, 5, 40], [0, 20, 4, 39]
    qkvs = [normal(rng, length, case.heads.row) for length in lengths]
    alone = [whole(ops, replace(case, length=len(qkv)), qkv)[start:] for qkv, start in zip(qkvs, starts)]
    qkvs.append(np.full((50, case.heads.row), np.nan, np.float32))
    lengths.append(50)
    starts.append(10)
    needed = [-(-length // case.block_size) for length in lengths]
    blocks = rng.permutation(sum(needed) + 4)
    tables = [blocks[sum(needed[:i]) : sum(needed[: i + 1])].tolist() for i in range(len(lengths))]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0], [1, 4]):
        kv = make_poisoned_kv(ops, case.heads, len(blocks), case.block_size)
        before = make_batch([Span(tables[i], 0, starts[i]) for i in order], case.block_size)
        ops.write_kv(np.concatenate([qkvs[i][: starts[i]] for i in order]), case.heads, kv, 0, before.kv_rows)
        batch = make_batch([Span(tables[i], starts[i], lengths[i] - starts[i]) for i in order], case.block_size)
        rows = np.concatenate([qkvs[i][starts[i] :] for i in order])
        ops.write_kv(rows, case.heads, kv, 0, batch.kv_rows)
        with np.errstate(invalid="ignore"):
            out = ops.attention(rows, case.heads, kv, 0, batch, case.scale)
        for part, i in zip(np.split(out, batch.span_starts[1:-1]), order):
            if i < len(alone):
                assert_same_bits(part, alone[i])


def test_layers_of_the_store_are_apart(ops: Ops, rng: np.random.Generator) -> None:
    case = AttentionCase(Heads(2, 1, 32), 20)
    qkvs = [normal(rng, case.length, case.heads.row) for _ in range(3)]
    kv = make_poisoned_kv(ops, case.heads, case.num_blocks, case.block_size, layers=3)
    batch = make_batch([Span(range(case.num_blocks), 0, case.length)], case.block_size)
    for layer, qkv in enumerate(qkvs):
        ops.write_kv(qkv, case.heads, kv, layer, batch.kv_rows)
    for layer, qkv in enumerate(qkvs):
        assert_same_bits(ops.attention(qkv, case.heads, kv, layer, batch, case.scale), whole(ops, case, qkv))


def test_large_scores_do_not_overflow(implementation: Implementation, ops: Ops, rng: np.random.Generator) -> None:
    case = AttentionCase(Heads(2, 1, 64), 70)
    qkv = normal(rng, case.length, case.heads.row) * np.float32(30)
    expected = attention_formula(*split_heads(qkv, case.heads), case.scale, 0, 0.0)
    # Scores of some thousands lose as many units of the last place, and so do the weights they become.
    assert_close(whole(ops, case, qkv), expected, 1e-2 + 2000 * implementation.kv_error)


def test_a_batch_without_tokens_is_legal(ops: Ops) -> None:
    heads = Heads(2, 1, 32)
    kv = ops.make_kv(KvLayout(1, 1, 32), 2, 16)
    batch = make_batch([], 16)
    nothing = np.empty((0, heads.row), np.float32)
    ops.write_kv(nothing, heads, kv, 0, batch.kv_rows)
    assert ops.attention(nothing, heads, kv, 0, batch, 1.0).shape == (0, 64)


@pytest.mark.parametrize("bad", [-1, 2])
def test_attention_refuses_blocks_outside_the_store(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    heads = Heads(2, 1, 32)
    kv = ops.make_kv(KvLayout(1, 1, 32), 2, 16)
    batch = make_batch([Span([0, 1], 16, 4)], 16)
    batch.block_tables[0, 1] = bad
    with pytest.raises(ValueError, match="block"):
        ops.attention(normal(rng, 4, heads.row), heads, kv, 0, batch, 1.0)


def test_attention_refuses_a_block_table_that_is_too_short(ops: Ops, rng: np.random.Generator) -> None:
    heads = Heads(2, 1, 32)
    kv = ops.make_kv(KvLayout(1, 1, 32), 2, 16)
    batch = replace(make_batch([Span([0, 1], 16, 4)], 16), block_tables=np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="block"):
        ops.attention(normal(rng, 4, heads.row), heads, kv, 0, batch, 1.0)


@pytest.mark.parametrize("bad", [-1, 32, 2**31 - 1])
def test_write_kv_refuses_rows_outside_the_store(ops: Ops, rng: np.random.Generator, bad: int) -> None:
    heads = Heads(2, 1, 32)
    kv = ops.make_kv(KvLayout(1, 1, 32), 2, 16)
    with pytest.raises(ValueError, match=str(bad)):
        ops.write_kv(normal(rng, 2, heads.row), heads, kv, 0, np.array([0, bad], np.int32))


def test_the_store_takes_what_its_blocks_are_said_to_take(ops: Ops) -> None:
    layout = KvLayout(3, 2, 64)
    kv = ops.make_kv(layout, 5, 16)
    assert (kv.num_blocks, kv.block_size) == (5, 16)
    assert kv.nbytes == 5 * ops.kv_block_bytes(layout, 16)


# ---- attention in encoders


@dataclass(frozen=True)
class EncoderCase:
    heads: Heads
    lengths: tuple[int, ...]
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def starts(self) -> Array:
        return np.cumsum([0, *self.lengths]).astype(np.int32)

    def __str__(self) -> str:
        h = self.heads
        return f"{h.num_q}q{h.num_kv}kv{h.head_dim}d-{'+'.join(map(str, self.lengths))}-c{self.softcap}"


ENCODER_CASES = [
    EncoderCase(Heads(2, 2, 32), (1, 2, 15, 16, 17)),
    EncoderCase(Heads(2, 2, 32), (31, 33, 63, 64, 65)),
    EncoderCase(Heads(2, 2, 32), (47, 0, 48, 49, 129, 0)),
    *(EncoderCase(Heads(2, 2, dim), (70, 9)) for dim in (1, 7, 16, 33, 64, 72, 80, 88, 128)),
    *(EncoderCase(Heads(*heads, 40), (70, 9)) for heads in ((1, 1), (3, 3), (6, 2), (8, 1))),
    EncoderCase(Heads(2, 2, 80), (300,)),
    EncoderCase(Heads(2, 2, 64), (100, 3), softcap=5.0),
    EncoderCase(Heads(2, 2, 64), ()),
]


@pytest.fixture(params=ENCODER_CASES, ids=str)
def encoder_case(request: pytest.FixtureRequest) -> EncoderCase:
    return request.param


def encode(ops: Ops, case: EncoderCase, qkv: FloatArray, starts: Array) -> Array:
    return ops.encoder_attention(qkv, case.heads, starts.astype(np.int32), case.scale, case.softcap)


def segments(case: EncoderCase, rows: FloatArray) -> list[FloatArray]:
    return np.split(rows, case.starts[1:-1]) if case.lengths else []


def test_encoder_attention_follows_its_formula_in_each_segment(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, encoder_case: EncoderCase
) -> None:
    heads = encoder_case.heads
    qkv = normal(rng, sum(encoder_case.lengths), heads.row)
    out = encode(ops, encoder_case, qkv, encoder_case.starts)
    assert out.shape == (len(qkv), heads.num_q * heads.head_dim)
    for part, rows in zip(segments(encoder_case, out), segments(encoder_case, qkv), strict=True):
        if len(rows):
            everything, scale, softcap = np.ones((len(rows), len(rows)), bool), encoder_case.scale, encoder_case.softcap
            expected = softmax_formula(*split_heads(rows, heads), everything, scale, softcap)
            assert_close(part, expected, 4 * implementation.error)


def test_encoder_attention_does_not_depend_on_the_other_segments(
    implementation: Implementation, ops: Ops, rng: np.random.Generator, encoder_case: EncoderCase
) -> None:
    """Alone on one thread; beside segments that are NaN; at another address, with NaN before and after the array."""
    heads, one_thread = encoder_case.heads, implementation.make(1)
    qkv = normal(rng, sum(encoder_case.lengths), heads.row)
    out = encode(ops, encoder_case, qkv, encoder_case.starts)
    for i, (part, rows) in enumerate(zip(segments(encoder_case, out), segments(encoder_case, qkv), strict=True)):
        alone = encode(one_thread, encoder_case, np.ascontiguousarray(rows), np.array([0, len(rows)]))
        assert_same_bits(np.ascontiguousarray(part), alone)
        first, last = encoder_case.starts[i : i + 2]
        poisoned = np.full_like(qkv, np.nan)
        poisoned[first:last] = rows
        with np.errstate(invalid="ignore"):
            beside = encode(ops, encoder_case, poisoned, encoder_case.starts)
        assert_same_bits(beside[first:last], part)
    buffer = np.full(qkv.size + 32, np.nan, np.float32)
    moved = buffer[5 : 5 + qkv.size].reshape(qkv.shape)
    moved[:] = qkv
    assert_same_bits(encode(ops, encoder_case, moved, encoder_case.starts), out)


def test_a_row_of_an_encoder_has_the_same_bits_wherever_it_asks(ops: Ops, rng: np.random.Generator) -> None:
    """What a row sees are the keys and values; it does not matter which queries are beside its own, nor its place."""
    heads = Heads(2, 2, 72)
    qkv = normal(rng, 150, heads.row)
    width = heads.num_q * heads.head_dim
    qkv[:, :width] = qkv[0, :width]
    starts = np.array([0, 150], np.int32)
    expected = ops.encoder_attention(qkv, heads, starts, 0.1)
    assert_same_bits(expected, np.repeat(expected[:1], 150, axis=0))
    qkv[1::2, :width] = np.nan
    with np.errstate(invalid="ignore"):
        assert_same_bits(ops.encoder_attention(qkv, heads, starts, 0.1)[::2], expected[::2])


def test_large_scores_do_not_overflow_in_encoders(ops: Ops, rng: np.random.Generator) -> None:
    heads = Heads(2, 2, 64)
    qkv = normal(rng, 130, heads.row) * np.float32(100)
    assert np.all(np.isfinite(ops.encoder_attention(qkv, heads, np.array([0, 130], np.int32), 1.0)))


@pytest.mark.parametrize("starts", [[], [0], [0, 4], [1, 5], [0, 3, 2, 5], [0, 6], [0, -1, 5], [0, 7, 5]])
def test_segments_that_do_not_cover_the_rows_are_refused(ops: Ops, rng: np.random.Generator, starts: list[int]) -> None:
    heads = Heads(2, 2, 32)
    with pytest.raises(ValueError, match="segment_starts must ascend from 0"):
        ops.encoder_attention(normal(rng, 5, heads.row), heads, np.array(starts, np.int32), 1.0)


# ---- the row property


@dataclass(frozen=True)
class RowCase:
    """An operation as a function of float rows and, for some, an integer for each row."""

    name: str
    width: int
    prepare: Callable[[Ops, np.random.Generator], Callable[[FloatArray, Array], Array]]


def linear_case(encoding: Encoding, num_inputs: int, num_outputs: int = 83) -> RowCase:
    def prepare(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
        bias = [random_tensor((num_outputs,), Encoding.F32, rng)]
        packed = ops.pack_linear([random_tensor((num_outputs, num_inputs), encoding, rng)], bias)
        return lambda x, _: ops.linear(x, packed)

    return RowCase(f"linear-{encoding.label}-{num_inputs}", num_inputs, prepare)


def rms_norm_case(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    weight = normal(rng, 83)
    return lambda x, _: ops.rms_norm(x, weight, 1e-6)


def add_rms_norm_case(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    weight = normal(rng, 83)

    def run(x: FloatArray, _: Array) -> Array:
        residual, update = np.ascontiguousarray(x[:, :83]), np.ascontiguousarray(x[:, 83:])
        normed = ops.add_rms_norm(residual, update, weight, 1e-6)
        return np.concatenate([residual, normed], axis=1)

    return run


def qk_norm_case(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    heads, q_weight, k_weight = Heads(3, 1, 80), normal(rng, 80), normal(rng, 80)

    def run(x: FloatArray, _: Array) -> Array:
        ops.qk_norm(x, heads, q_weight, k_weight, 1e-6)
        return x

    return run


def rope_case(style: RopeStyle) -> RowCase:
    def prepare(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
        heads, table = Heads(3, 1, 80), rope_table(rng, 64, 40, style)

        def run(x: FloatArray, positions: Array) -> Array:
            ops.rope(x, heads, positions, table)
            return x

        return run

    return RowCase(f"rope-{style.value}", 400, prepare)


def axes_case(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    heads, table = Heads(3, 1, 80), rope_table(rng, 64, 40, RopeStyle.HALVES)
    table = replace(table, axes=rng.integers(0, 3, 20, np.int32))

    def run(x: FloatArray, positions: Array) -> Array:
        ops.rope(x, heads, np.stack([positions, positions // 2, 63 - positions], axis=1), table)
        return x

    return run


def layer_norm_case(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    weight, bias = normal(rng, 83), normal(rng, 83)
    return lambda x, _: ops.layer_norm(x, weight, bias, 1e-6)


def add_case(ops: Ops, _: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    def run(x: FloatArray, _: Array) -> Array:
        total = np.ascontiguousarray(x[:, :83])
        ops.add(total, np.ascontiguousarray(x[:, 83:]))
        return total

    return run


def activate_case(activation: Activation) -> RowCase:
    def prepare(ops: Ops, _: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
        def run(x: FloatArray, _: Array) -> Array:
            ops.activate(x, activation)
            return x

        return run

    return RowCase(f"activate-{activation.value}", 83, prepare)


def gated_case(activation: Activation) -> RowCase:
    return RowCase(activation.value, 2 * 83, lambda ops, _: lambda x, _: ops.gated_activation(x, activation))


def route_case(name: str) -> RowCase:
    num_experts, routing, biased = ROUTINGS[name]

    def prepare(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
        bias = normal(rng, num_experts) if biased else None

        def run(x: FloatArray, _: Array) -> Array:
            ids, weights = ops.route(x, routing, bias)
            return np.where(np.isnan(weights), weights, weights + ids.astype(np.float32))

        return run

    return RowCase(f"route-{name}", num_experts, prepare)


def experts_case(*encodings: Encoding) -> RowCase:
    def prepare(ops: Ops, rng: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
        tensors = expert_tensors(rng, 5, 256, 256, *encodings)
        experts = ops.pack_experts(tensors.gate_up, tensors.down)

        def run(x: FloatArray, numbers: Array) -> Array:
            ids = np.stack([numbers % 5, (numbers + 1 + numbers % 3) % 5], axis=1)
            weights = np.stack([0.3 + numbers, 0.1 - numbers / 7], axis=1).astype(np.float32)
            return ops.experts(x, ids, weights, experts, Activation.SILU)

        return run

    return RowCase(f"experts-{'-'.join(encoding.label for encoding in encodings)}", 256, prepare)


def softcap_case(ops: Ops, _: np.random.Generator) -> Callable[[FloatArray, Array], Array]:
    def run(x: FloatArray, _: Array) -> Array:
        ops.softcap(x, 2.0)
        return x

    return run


ROW_CASES = [
    *(linear_case(encoding, 70) for encoding in (Encoding.F32, Encoding.F16, Encoding.BF16)),
    *(linear_case(encoding, 512) for encoding in (Encoding.F32, Encoding.BF16, *BLOCK_ENCODINGS)),
    RowCase("rms_norm", 83, rms_norm_case),
    RowCase("add_rms_norm", 2 * 83, add_rms_norm_case),
    RowCase("qk_norm", 400, qk_norm_case),
    RowCase("layer_norm", 83, layer_norm_case),
    RowCase("add", 2 * 83, add_case),
    *(rope_case(style) for style in RopeStyle),
    RowCase("rope-axes", 400, axes_case),
    *(activate_case(activation) for activation in Activation),
    *(gated_case(activation) for activation in Activation),
    *(route_case(name) for name in ("qwen3", "deepseek", "odd")),
    experts_case(Encoding.F32, Encoding.F32, Encoding.F16),
    experts_case(Encoding.BF16, Encoding.BF16, Encoding.Q8_0),
    experts_case(Encoding.Q4_K, Encoding.Q4_K, Encoding.Q6_K),
    RowCase("softcap", 83, softcap_case),
]


@pytest.fixture(params=ROW_CASES, ids=lambda row_case: row_case.name)
def row_case(request: pytest.FixtureRequest) -> RowCase:
    return request.param


@pytest.fixture
def functions(
    implementation: Implementation, row_case: RowCase
) -> Iterator[tuple[Callable[[FloatArray, Array], Array], ...]]:
    """The operation on 2, 1 and 5 threads, with the same weights. Rows are copied: some work in place."""
    prepared = [row_case.prepare(implementation.make(n), np.random.default_rng(3)) for n in (THREADS, 1, 5)]
    with np.errstate(invalid="ignore", over="ignore"):
        yield tuple(lambda x, numbers, f=f: f(x.copy(), numbers) for f in prepared)


def rows_of(row_case: RowCase, rng: np.random.Generator, count: int) -> tuple[FloatArray, Array]:
    return normal(rng, count, row_case.width) * 3, rng.integers(0, 64, count, np.int32)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 17, 40, 211])
def test_a_row_has_the_same_bits_alone(
    row_case: RowCase, functions: tuple[Callable[..., Array], ...], rng: np.random.Generator, count: int
) -> None:
    """211 rows are enough for threads to share any operation."""
    x, numbers = rows_of(row_case, rng, count)
    alone = np.concatenate([functions[1](x[i : i + 1], numbers[i : i + 1]) for i in range(count)])
    for function in functions:
        assert_same_bits(function(x, numbers), alone)


def test_a_row_has_the_same_bits_in_any_order(
    row_case: RowCase, functions: tuple[Callable[..., Array], ...], rng: np.random.Generator
) -> None:
    x, numbers = rows_of(row_case, rng, 23)
    expected = functions[0](x, numbers)
    for _ in range(3):
        order = rng.permutation(23)[: rng.integers(1, 24)]
        assert_same_bits(functions[0](x[order], numbers[order]), expected[order])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_has_the_same_bits_beside_poisoned_ones(
    row_case: RowCase, functions: tuple[Callable[..., Array], ...], rng: np.random.Generator, poison: float
) -> None:
    x, numbers = rows_of(row_case, rng, 9)
    expected = functions[0](x, numbers)
    for kept in range(9):
        poisoned = np.full_like(x, poison)
        poisoned[kept] = x[kept]
        assert_same_bits(functions[0](poisoned, numbers)[kept], expected[kept])


@pytest.mark.parametrize("offset", [1, 3, 5, 15])
def test_a_row_has_the_same_bits_at_any_address(
    implementation: Implementation, row_case: RowCase, rng: np.random.Generator, offset: int
) -> None:
    """``offset`` numbers away from where numpy aligns an array."""
    function = row_case.prepare(implementation.make(THREADS), np.random.default_rng(3))
    x, numbers = rows_of(row_case, rng, 9)
    buffer = np.full(x.size + 32, np.nan, np.float32)
    moved = buffer[offset : offset + x.size].reshape(x.shape)
    moved[:] = x
    assert_same_bits(function(moved, numbers), function(x.copy(), numbers))
    assert np.all(np.isnan(buffer[:offset]))
    assert np.all(np.isnan(buffer[offset + x.size :]))


def test_poison_in_a_row_stays_visible(
    row_case: RowCase, functions: tuple[Callable[..., Array], ...], rng: np.random.Generator
) -> None:
    """A NaN must reach the logits, where it ends its request with an error, and not be lost on the way."""
    x, numbers = rows_of(row_case, rng, 2)
    x[1] = np.nan
    assert np.all(np.isnan(functions[0](x, numbers)[1][: row_case.width // 2]))
