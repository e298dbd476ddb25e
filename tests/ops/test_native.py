"""The native kernels beyond the conformance suite: equal bits on every instruction set, long contexts, packed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline import _native
from paceline.dequantize import to_float32
from paceline.ops.api import Activation, RopeStyle, RopeTable, Routing, Scoring
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array, ChoiceControls, Encoding, FloatArray, Heads, KvLayout, RawTensor
from support.batches import Span, make_batch
from support.choosing import controls
from support.raw_tensors import random_tensor

LEVELS = _native.levels()
BF16_PAIRS = {level: name for level in LEVELS if (name := _native.Cpu(1, level).bf16_name)}
"""Levels that multiply pairs of bfloat16 numbers, and the name of their order of sums."""
"""Those that say that they compute with bfloat16 weights in a way of their own."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, np.float32)


def assert_equal_on_all_levels(results: dict[str, Array]) -> None:
    first = results["portable"]
    for level, result in results.items():
        assert np.array_equal(result.view(np.uint32), first.view(np.uint32)), level


# ---- equal bits on every instruction set


def levels_that_agree(encoding: Encoding) -> list[str]:
    return [level for level in LEVELS if encoding is not Encoding.BF16 or level not in BF16_PAIRS]


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
def test_linear_layers_give_equal_bits_on_every_instruction_set(rng: np.random.Generator, encoding: Encoding) -> None:
    raw, bias = random_tensor((83, 512), encoding, rng), random_tensor((83,), Encoding.F32, rng)
    x = normal(rng, 37, 512)
    x[3] *= 1e-25  # products below the smallest normal number
    x[4] *= 1e25
    results = {}
    for level in levels_that_agree(encoding):
        ops = CpuOps(2, level)
        results[level] = ops.linear(x, ops.pack_linear([raw], [bias]))
    assert_equal_on_all_levels(results)


def test_only_products_of_bfloat16_pairs_have_bits_of_their_own() -> None:
    assert BF16_PAIRS.items() <= {"avx512_bf16": "bf16-dot", "avx512_amx": "bf16-tiles"}.items()
    others = {CpuOps(1, level).numerics for level in LEVELS if level not in BF16_PAIRS}
    assert others == {CpuOps(1, "portable").numerics}
    assert all(name in CpuOps(1, level).numerics for level, name in BF16_PAIRS.items())
    assert len({CpuOps(1, level, "int8").numerics for level in LEVELS}) == 1


@pytest.mark.parametrize("num_inputs", [1, 2, 15, 16, 17, 33, 64, 129, 576])
@pytest.mark.parametrize("level", BF16_PAIRS)
def test_products_of_bfloat16_pairs_are_added_in_the_stated_order(
    rng: np.random.Generator, level: str, num_inputs: int
) -> None:
    """So say the processor's manuals. The numbers are such that float64 holds every sum before it is rounded."""
    raw = random_tensor((40, num_inputs), Encoding.BF16, rng)
    x = normal(rng, 37, num_inputs)
    rounded, weights = (np.pad(a, ((0, 0), (0, num_inputs % 2))) for a in (to_bf16(x), to_float32(raw)))

    def add_product(acc: FloatArray, i: int) -> FloatArray:
        return (acc + rounded[:, i, None].astype(np.float64) * weights[:, i]).astype(np.float32)

    acc = np.zeros((37, 40), np.float32)
    pairs = range(0, rounded.shape[1], 2)
    if BF16_PAIRS[level] == "bf16-dot":
        for k in pairs:
            acc = add_product(add_product(acc, k + 1), k)
    else:
        for first in range(0, len(pairs), 16):
            even, odd = np.zeros_like(acc), np.zeros_like(acc)
            for k in pairs[first : first + 16]:
                even, odd = add_product(even, k), add_product(odd, k + 1)
            acc = acc + (even + odd)
    ops = CpuOps(2, level)
    for rows in (37, 20, 1):
        assert np.array_equal(ops.linear(x[:rows], ops.pack_linear([raw])), acc[:rows])


def to_bf16(x: FloatArray) -> FloatArray:
    """Rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_row_operations_give_equal_bits_on_every_instruction_set(rng: np.random.Generator) -> None:
    heads = Heads(3, 1, 80)
    x = normal(rng, 7, 402) * np.float32([[1e-20], [1e-3], [1], [3], [10], [100], [1e6]])
    qkv, weight, head_weight = normal(rng, 7, heads.row), normal(rng, 402), normal(rng, 80)
    angles = rng.uniform(-3, 3, (64, 20))
    positions, axes = rng.integers(0, 64, 7, np.int32), rng.integers(0, 2, 20, np.int32)
    results = {}
    for level in LEVELS:
        ops = CpuOps(2, level)
        capped, fused, residual = x.copy(), qkv.copy(), x.copy()
        ops.softcap(capped, 7.0)
        ops.qk_norm(fused, heads, head_weight, head_weight, 1e-6)
        for style in RopeStyle:
            table = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), style)
            ops.rope(fused, heads, positions, table)
            ops.rope(fused, heads, np.stack([positions, positions[::-1]], axis=1), replace(table, axes=axes))
        parts = [
            capped,
            fused,
            ops.rms_norm(x, weight, 1e-6),
            ops.add_rms_norm(residual, x[::-1].copy(), weight, 1e-6),
            residual,
            ops.layer_norm(x, weight, x[0], 1e-6),
            *(ops.gated_activation(x, activation) for activation in Activation),
        ]
        results[level] = np.concatenate([part.reshape(-1) for part in parts])
    assert_equal_on_all_levels(results)


@pytest.mark.parametrize("scoring", list(Scoring), ids=lambda s: s.value)
def test_routing_gives_equal_bits_on_every_instruction_set(rng: np.random.Generator, scoring: Scoring) -> None:
    logits, bias = normal(rng, 300, 160) * 3, normal(rng, 160)
    routing = Routing(6, scoring, renormalize=True, scale=2.5, num_groups=8, top_groups=3)
    results = {}
    for level in LEVELS:
        ids, weights = CpuOps(2, level).route(logits, routing, bias)
        results[level] = np.concatenate([ids.astype(np.float32), weights], axis=1)
    assert_equal_on_all_levels(results)


def test_more_experts_than_a_router_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 \.\. 1024 experts, not 1025"):
        CpuOps(1).route(np.zeros((1, 1025), np.float32), Routing(1, Scoring.SOFTMAX, renormalize=True))


def packed_experts(ops: CpuOps, rng: np.random.Generator, encoding: Encoding) -> _native.Experts:
    """Twelve of them, 64 wide, 96 numbers inside."""
    gate_up = [[random_tensor((192, 64), encoding, rng)] for _ in range(12)]
    return ops.pack_experts(gate_up, [random_tensor((64, 96), encoding, rng) for _ in range(12)])


EXPERT_ENCODINGS = [Encoding.F32, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_1]


@pytest.mark.parametrize("encoding", EXPERT_ENCODINGS, ids=lambda e: e.label)
def test_experts_give_equal_bits_on_every_instruction_set(rng: np.random.Generator, encoding: Encoding) -> None:
    x, weights = normal(rng, 90, 64), normal(rng, 90, 3)
    ids = rng.integers(0, 12, (90, 3), np.int32)
    results = {}
    for level in levels_that_agree(encoding):
        ops = CpuOps(2, level)
        experts = packed_experts(ops, np.random.default_rng(5), encoding)
        results[level] = ops.experts(x, ids, weights, experts, Activation.SILU)
    assert_equal_on_all_levels(results)


@pytest.mark.parametrize("encoding", EXPERT_ENCODINGS, ids=lambda e: e.label)
@pytest.mark.parametrize("num_rows", [1, 7, 512, 513, 1100])
def test_experts_are_summed_by_fma_in_the_order_of_the_choice(
    rng: np.random.Generator, encoding: Encoding, num_rows: int
) -> None:
    """A dense layer is such a chain, too: over the outputs of a row. Any number of threads gives the same."""
    x, weights = normal(rng, num_rows, 64), normal(rng, num_rows, 5)
    ids = np.minimum(rng.integers(0, 12, (num_rows, 5), np.int32), rng.integers(0, 12, (num_rows, 5), np.int32))
    results = []
    for num_threads in (1, 2, 5, 16):
        ops = CpuOps(num_threads)
        experts = packed_experts(ops, np.random.default_rng(5), encoding)
        results.append(ops.experts(x, ids, weights, experts, Activation.SILU))
    for result in results[1:]:
        assert np.array_equal(result, results[0])
    one = np.ones((num_rows, 1), np.float32)
    apart = [ops.experts(x, np.ascontiguousarray(ids[:, j : j + 1]), one, experts, Activation.SILU) for j in range(5)]
    for t in {0, num_rows // 2, num_rows - 1}:
        outputs = np.stack([part[t] for part in apart], axis=1)
        raw = RawTensor("outputs", outputs.shape, Encoding.F32, outputs.reshape(-1).view(np.uint8))
        chain = ops.linear(np.ascontiguousarray(weights[t : t + 1]), ops.pack_linear([raw]))
        assert np.array_equal(results[0][t].view(np.uint32), chain[0].view(np.uint32))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (700, 0.0), (0, 20.0)])
def test_attention_gives_equal_bits_on_every_instruction_set(
    rng: np.random.Generator, window: int, softcap: float
) -> None:
    heads = Heads(6, 2, 80)
    qkv = normal(rng, 1100, heads.row)
    results = {}
    for level in LEVELS:
        ops = CpuOps(2, level)
        kv = ops.make_kv(KvLayout(1, heads.num_kv, heads.head_dim), 35, 32)
        everything = make_batch([Span(range(35), 0, len(qkv))], 32)
        ops.write_kv(qkv, heads, kv, 0, everything.kv_rows)
        last = make_batch([Span(range(35), 1060, 40)], 32)
        results[level] = ops.attention(qkv[1060:].copy(), heads, kv, 0, last, 0.1, window, softcap)
    assert_equal_on_all_levels(results)


@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_encoder_attention_gives_equal_bits_on_every_instruction_set_and_number_of_threads(
    rng: np.random.Generator, softcap: float
) -> None:
    heads = Heads(6, 3, 72)
    qkv = normal(rng, 700, heads.row) * 2
    starts = np.array([0, 64, 128, 130, 130, 600, 700], np.int32)
    results = {level: CpuOps(2, level).encoder_attention(qkv, heads, starts, 0.1, softcap) for level in LEVELS}
    assert_equal_on_all_levels(results)
    for num_threads in (1, 5, 16):
        other = CpuOps(num_threads).encoder_attention(qkv, heads, starts, 0.1, softcap)
        assert np.array_equal(other.view(np.uint32), results[LEVELS[0]].view(np.uint32))


# ---- contexts of several segments


def whole(ops: CpuOps, heads: Heads, qkv: FloatArray, window: int, softcap: float) -> Array:
    return in_spans(ops, heads, qkv, window, softcap, [])


def in_spans(ops: CpuOps, heads: Heads, qkv: FloatArray, window: int, softcap: float, cuts: list[int]) -> Array:
    num_blocks = -(-len(qkv) // 32)
    kv = ops.make_kv(KvLayout(1, heads.num_kv, heads.head_dim), num_blocks, 32)
    kv.memory[:] = 0x7FC0  # NaN
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, len(qkv)], strict=True):
        batch = make_batch([Span(range(num_blocks), start, end - start)], 32)
        rows = np.ascontiguousarray(qkv[start:end])
        ops.write_kv(rows, heads, kv, 0, batch.kv_rows)
        outputs.append(ops.attention(rows, heads, kv, 0, batch, heads.head_dim**-0.5, window, softcap))
    return np.concatenate(outputs)


@pytest.mark.parametrize("window", [0, 1, 500, 1024, 1025, 2000])
def test_attention_over_several_segments_does_not_depend_on_the_cuts(rng: np.random.Generator, window: int) -> None:
    heads = Heads(2, 1, 32)
    qkv = normal(rng, 2200, heads.row)
    expected = whole(CpuOps(2), heads, qkv, window, 0.0)
    for cuts in ([1, 1023, 1024, 1025, 2047, 2048, 2049], [700, 701, 1500, 2199], list(range(1010, 1040))):
        assert np.array_equal(in_spans(CpuOps(1), heads, qkv, window, 0.0, cuts), expected)


@pytest.mark.parametrize("window", [0, 1500])
def test_attention_over_several_segments_follows_its_formula(rng: np.random.Generator, window: int) -> None:
    heads = Heads(1, 1, 32)
    qkv = normal(rng, 2200, heads.row)
    out = whole(CpuOps(2), heads, qkv, window, 0.0)
    q, k, v = np.split(qkv.astype(np.float64), 3, axis=1)
    for position in (0, 1023, 1024, 1025, 2047, 2048, 2199):
        low = max(0, position - window + 1) if window else 0
        scores = k[low : position + 1] @ q[position] * 32**-0.5
        weights = np.exp(scores - scores.max())
        expected = weights @ v[low : position + 1] / weights.sum()
        assert np.allclose(out[position], expected, atol=5e-3 * np.abs(expected).max())


# ---- packed forms


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
def test_decoding_agrees_with_the_reference_bit_for_bit(rng: np.random.Generator, encoding: Encoding) -> None:
    raw = random_tensor((7, 512), encoding, rng)
    out = np.empty(7 * 512, np.float32)
    _native.decode(encoding.label, raw.data, out)
    assert np.array_equal(out.view(np.uint32), to_float32(raw).reshape(-1).view(np.uint32))


def test_every_half_precision_number_is_decoded_exactly() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    finite_or_infinite = bits[(bits & 0x7FFF) <= 0x7C00]
    out = np.empty(len(finite_or_infinite), np.float32)
    _native.decode("F16", finite_or_infinite.view(np.uint8), out)
    expected = finite_or_infinite.view(np.float16).astype(np.float32)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


FORMS = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "Q4_0": "int4-g32", "Q4_1": "int4-g32", "Q4_K": "int4-g32",
    "Q5_0": "int8-g32", "Q5_1": "int8-g32", "Q8_0": "int8-g32", "Q5_K": "int8-g32", "Q6_K": "int8-g32",
}  # fmt: skip


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.label)
def test_each_encoding_has_its_packed_form(rng: np.random.Generator, encoding: Encoding) -> None:
    assert CpuOps(1).pack_linear([random_tensor((17, 512), encoding, rng)]).form == FORMS[encoding.label]


def packed_values(ops: CpuOps, raw: RawTensor) -> Array:
    """The matrix that a packed one stands for: unit vectors are quantised exactly, 127 times 1/127."""
    packed = ops.pack_linear([raw])
    return ops.linear(np.eye(raw.shape[1], dtype=np.float32), packed).T


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0, Encoding.Q5_0, Encoding.Q4_K])
def test_grouped_encodings_keep_their_values(rng: np.random.Generator, encoding: Encoding) -> None:
    raw = random_tensor((20, 256), encoding, rng)
    exact = to_float32(raw)
    # Scales of Q4_K are products that float16 rounds; Q5_0 is quantised anew but fits int8.
    error = {Encoding.Q4_K: 2e-3, Encoding.Q5_0: 1e-2}.get(encoding, 1e-6)
    size = np.abs(exact).reshape(20, 8, 32).max(axis=2).repeat(32, axis=1)
    assert np.all(np.abs(packed_values(CpuOps(1), raw) - exact) <= error * size + 1e-30)


@pytest.mark.parametrize("num_inputs", [64, 70])
def test_int8_quantization_rounds_to_the_nearest_step(rng: np.random.Generator, num_inputs: int) -> None:
    raw = random_tensor((20, num_inputs), Encoding.BF16, rng)
    exact, values = groups_of(to_float32(raw)), groups_of(packed_values(CpuOps(1, quantization="int8"), raw))
    step = np.abs(exact).max(axis=2, keepdims=True) / 127
    assert np.all(np.abs(values - exact) <= 0.55 * step)


def groups_of(matrix: Array) -> Array:
    """[N, K] -> [N, groups, 32], with zeros after the last input."""
    padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % 32)))
    return padded.reshape(len(matrix), -1, 32)


@pytest.mark.parametrize("num_inputs", [64, 70])
def test_int4_quantization_errs_less_than_steps_between_the_extremes(rng: np.random.Generator, num_inputs: int) -> None:
    raw = random_tensor((200, num_inputs), Encoding.BF16, rng)
    exact, values = groups_of(to_float32(raw)), groups_of(packed_values(CpuOps(1, quantization="int4"), raw))
    low, high = exact.min(axis=2, keepdims=True), exact.max(axis=2, keepdims=True)
    plain = low + (high - low) / 15 * np.rint((exact - low) / (high - low) * 15)
    errors, plain_errors = (((v - exact) ** 2).sum(axis=2) for v in (values, plain))
    assert np.all(errors <= 1.01 * plain_errors)
    assert errors.sum() < 0.85 * plain_errors.sum()


def test_int4_quantization_finds_a_grid_that_is_there(rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16, (20, 96))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    values = (codes * 0.125 - 1.5).astype(np.float32)
    values[3] = 0.75  # a row without any spread
    values[4, :32] = 1000 + codes[4, :32]  # far from zero
    raw = RawTensor("grid", values.shape, Encoding.F32, values.reshape(-1).view(np.uint8))
    assert np.allclose(packed_values(CpuOps(1, quantization="int4"), raw), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantization_gives_equal_bits_on_every_instruction_set(rng: np.random.Generator, form: str) -> None:
    raw, x = random_tensor((83, 320), Encoding.BF16, rng), normal(rng, 3, 320)
    results = {}
    for level in LEVELS:
        ops = CpuOps(2, level, form)
        results[level] = ops.linear(x, ops.pack_linear([raw]))
    assert_equal_on_all_levels(results)


def test_sensitive_matrices_keep_eight_bits(rng: np.random.Generator) -> None:
    dense, grouped = random_tensor((20, 64), Encoding.F16, rng), random_tensor((20, 64), Encoding.Q4_1, rng)
    forms = {None: "f16", "int8": "int8-g32", "int4": "int8-g32"}
    for quantization, form in forms.items():
        ops = CpuOps(1, quantization=quantization)
        assert ops.pack_linear([dense], sensitive=True).form == form
        assert ops.pack_linear([grouped], sensitive=True).form == "int4-g32"


def test_rows_of_different_encodings_share_a_panel(rng: np.random.Generator) -> None:
    raws = [random_tensor((7, 256), e, rng) for e in (Encoding.BF16, Encoding.Q4_1, Encoding.F32, Encoding.Q4_K)]
    ops = CpuOps(1, quantization="int4")
    x = normal(rng, 2, 256)
    together = ops.pack_linear(raws)
    assert together.form == "int4-g32"
    apart = np.concatenate([ops.linear(x, ops.pack_linear([raw])) for raw in raws], axis=1)
    assert np.array_equal(ops.linear(x, together), apart)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_that_are_not_finite_are_refused(rng: np.random.Generator, form: str, bad: float) -> None:
    values = normal(rng, 20, 64)
    values[17, 40] = bad
    raw = RawTensor("blk.0.weight", values.shape, Encoding.F32, values.reshape(-1).view(np.uint8))
    with pytest.raises(ValueError, match=r"blk\.0\.weight.*not finite"):
        CpuOps(1, quantization=form).pack_linear([raw])


def test_weights_beyond_float16_scales_are_refused(rng: np.random.Generator) -> None:
    raw = random_tensor((4, 64), Encoding.F32, rng)
    data = (raw.data.view(np.float32) * np.float32(1e30)).view(np.uint8)
    huge = RawTensor("blk.0.weight", raw.shape, raw.encoding, data)
    with pytest.raises(ValueError, match=r"blk\.0\.weight"):
        CpuOps(1, quantization="int8").pack_linear([huge])


# ---- arguments


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="isa"):
        CpuOps(1, "mmx")


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_number_of_threads_below_one_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        CpuOps(num_threads)


def test_arrays_of_the_wrong_shape_are_refused(rng: np.random.Generator) -> None:
    ops = CpuOps(1)
    packed = ops.pack_linear([random_tensor((4, 32), Encoding.F32, rng)])
    with pytest.raises(ValueError, match=r"x must be \[3, 32\]"):
        ops.linear(normal(rng, 3, 33), packed)
    with pytest.raises(ValueError, match="weight must have 32"):
        ops.rms_norm(normal(rng, 3, 32), normal(rng, 31), 1e-6)
    table = RopeTable(*normal(rng, 2, 4, 16), RopeStyle.PAIRS)
    with pytest.raises(ValueError, match="qkv must be"):
        ops.rope(normal(rng, 2, 65), Heads(1, 1, 32), np.zeros(2, np.int32), table)


def test_many_threads_give_the_bits_of_one(rng: np.random.Generator) -> None:
    raw = random_tensor((200, 256), Encoding.Q4_1, rng)
    x = normal(rng, 150, 256)
    results = [ops.linear(x, ops.pack_linear([raw])) for ops in (CpuOps(1), CpuOps(2), CpuOps(5), CpuOps(16))]
    for result in results[1:]:
        assert np.array_equal(result, results[0])


# ---- the choice of tokens, over a real vocabulary's width


def random_controls(rng: np.random.Generator, count: int) -> ChoiceControls:
    return controls(
        count,
        temperature=rng.choice([0.5, 1, 2], count),
        top_k=rng.choice([0, 0, 5, 300], count),
        top_p=rng.choice([1, 1, 0.5, 0.95], count),
        min_p=rng.choice([0, 0, 0.05], count),
        seeds=rng.integers(2**64, size=count, dtype=np.uint64),
        positions=rng.integers(1000, size=count),
    )


def test_choices_and_logprobs_are_equal_on_every_instruction_set(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 3, (40, 49_155)).astype(np.float32)
    how = random_controls(rng, 40)
    results = {}
    for level in LEVELS:
        ops = CpuOps(2, level)
        chosen = ops.choose(logits, how)
        scored = ops.top_logprobs(logits, chosen, 20)
        results[level] = np.concatenate([chosen.astype(np.float32), scored.chosen, scored.top_values.reshape(-1)])
    assert_equal_on_all_levels(results)


@pytest.mark.parametrize("spread", [0.1, 3, 12])
def test_looking_only_at_contenders_chooses_what_looking_at_all_does(rng: np.random.Generator, spread: float) -> None:
    logits = rng.normal(0, spread, (30, 49_155)).astype(np.float32)
    how = random_controls(rng, 30)
    assert CpuOps(2).choose(logits, how).tolist() == ReferenceOps().choose(logits, how).tolist()
