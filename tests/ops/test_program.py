"""Captured forward passes: the bits of the same operations called one by one; refusal of what cannot be captured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline import _native
from paceline.models.decoder import Decoder
from paceline.models.registry import HF_FAMILIES
from paceline.ops.api import Activation, Forward, KvStore, LayerOps, RopeStyle, RopeTable, Routing, Scoring
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array, Batch, Encoding, FloatArray, Heads, IntArray, KvLayout
from support.batches import Span, make_batch
from support.random_model import VOCAB_SIZE, random_adapters, random_model
from support.raw_tensors import random_tensor

BLOCK_SIZE = 16
NUM_BLOCKS = 24
WIDTH = 160
WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "head_dim": 48},
    "MistralForCausalLM": {"sliding_window": 11},
    "Qwen2ForCausalLM": WINDOWED,
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 9,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
}


def captured(model: Decoder, ops: CpuOps) -> Forward:
    return ops.capture(lambda to_call: model.with_ops(to_call).forward)


def random_batches(rng: np.random.Generator) -> list[Batch]:
    """Prompts in chunks, then decoding beside the start of another one; every batch needs what was stored before."""
    tables = [range(0, 8), range(8, 13), range(13, 21)]
    spans = [
        [(0, 0, 1)],
        [(0, 1, 1)],
        [(0, 2, 3), (1, 0, 70)],
        [(0, 5, 1), (1, 70, 1), (2, 0, 128)],
        [(0, 6, 1), (1, 71, 1)],
        [(0, 7, 41), (1, 72, 2)],
        [],
        [(2, 127, 1)],
    ]
    return [
        make_batch([Span(tables[i], start, n, rng.integers(VOCAB_SIZE, size=n).tolist()) for i, start, n in step], 16)
        for step in spans
    ]


def run(forward: Forward, ops: CpuOps, model: Decoder, batches: list[Batch]) -> list[FloatArray]:
    kv = ops.make_kv(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE)
    kv.memory[:] = 0x7FC0  # NaN
    return [forward(batch, kv) for batch in batches]


def assert_equal(actual: list[FloatArray], expected: list[FloatArray]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert not np.isnan(other).any()
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("architecture", HF_FAMILIES)
def test_every_architecture_gives_the_bits_of_single_calls(architecture: str, num_threads: int) -> None:
    ops = CpuOps(num_threads)
    model = random_model(
        ops, architectures=[architecture], max_position_embeddings=128, **CHANGES.get(architecture, {})
    )
    batches = random_batches(np.random.default_rng(4))
    assert_equal(run(captured(model, ops), ops, model, batches), run(model.forward, ops, model, batches))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("isa", _native.levels())
def test_every_instruction_set_gives_the_bits_of_single_calls(isa: str, quantization: str | None) -> None:
    ops = CpuOps(2, isa, quantization)
    # Wide enough that even a single token is shared among threads.
    model = random_model(ops, hidden_size=160, intermediate_size=320, num_attention_heads=6)
    batches = random_batches(np.random.default_rng(4))
    assert_equal(run(captured(model, ops), ops, model, batches), run(model.forward, ops, model, batches))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_beside_those_of_adapters_have_the_bits_of_the_program(num_threads: int) -> None:
    ops = CpuOps(num_threads)
    model = replace(random_model(ops), adapters=random_adapters(ops))
    forward = captured(model, ops)
    alone, beside = [], []
    for adapter, outputs in ((None, alone), ("wide", beside)):
        kv = ops.make_kv(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE)
        for start, count in ((0, 20), (20, 1), (21, 30)):
            tokens = [(start + i) % VOCAB_SIZE for i in range(count)]
            spans = [Span(range(8), start, count, tokens), Span(range(8, 16), start, count, tokens, adapter)]
            outputs.append(forward(make_batch(spans, BLOCK_SIZE), kv))
    for one, other in zip(alone, beside, strict=True):
        half = len(one) // 2
        assert_equal([one[:half]], [other[:half]])
        assert_equal([one[:half]], [one[half:]])
        assert not np.allclose(one[half:], other[half:], atol=0.01)


def test_a_program_cannot_take_adapters() -> None:
    ops = CpuOps(1)
    lora = random_adapters(ops)["wide"].layers[0]["qkv"]

    def build(to_call: LayerOps) -> Forward:
        def forward(batch: Batch, kv: KvStore) -> FloatArray:  # noqa: ARG001
            x = to_call.embed(batch.token_ids, Parts(ops).embedding)
            to_call.add_lora(x, x, lora, batch.token_ids)
            return x

        return forward

    with pytest.raises(ValueError, match="no adapters"):
        ops.capture(build)


class Parts:
    """Weights for passes over operations that the decoder does not call. Packed once, for every way of running them."""

    def __init__(self, ops: CpuOps) -> None:
        rng = np.random.default_rng(8)
        self.heads = Heads(3, 1, 32)
        self.embedding = ops.pack_embedding(random_tensor((VOCAB_SIZE, WIDTH), Encoding.F32, rng))
        self.qkv = ops.pack_linear([random_tensor((self.heads.row, WIDTH), Encoding.BF16, rng)])
        self.back = ops.pack_linear([random_tensor((WIDTH, self.heads.row), Encoding.Q4_1, rng)])
        self.router = ops.pack_linear([random_tensor((9, WIDTH), Encoding.F32, rng)])
        self.router_bias = rng.standard_normal(9, np.float32)
        gate_up = [[random_tensor((2 * 64, WIDTH), Encoding.Q8_0, rng)] for _ in range(9)]
        self.experts = ops.pack_experts(gate_up, [random_tensor((WIDTH, 64), Encoding.BF16, rng) for _ in range(9)])
        self.weight, self.bias = rng.standard_normal((2, WIDTH), np.float32)
        angles = rng.uniform(-3, 3, (128, 16))
        axes = rng.permutation(16).astype(np.int32) % 3
        self.rope = RopeTable(
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), RopeStyle.HALVES, axes
        )


def block_of_an_encoder(ops: LayerOps, parts: Parts, batch: Batch) -> FloatArray:
    x = ops.embed(batch.token_ids, parts.embedding)
    for activation in Activation:
        qkv = ops.linear(ops.layer_norm(x, parts.weight, parts.bias, 1e-6), parts.qkv)
        ops.rope(qkv, parts.heads, batch.positions, parts.rope)
        ops.activate(qkv, activation)
        ops.add(x, ops.linear(qkv, parts.back))
    return x


def layers_of_experts(ops: LayerOps, parts: Parts, batch: Batch) -> FloatArray:
    x = ops.embed(batch.token_ids, parts.embedding)
    for scoring in Scoring:
        routing = Routing(2, scoring, renormalize=True, num_groups=3, top_groups=2)
        normed = ops.layer_norm(x, parts.weight, parts.bias, 1e-6)
        ids, weights = ops.route(ops.linear(normed, parts.router), routing, parts.router_bias)
        ops.add(x, ops.experts(normed, ids, weights, parts.experts, Activation.SILU))
    return x


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("block", [block_of_an_encoder, layers_of_experts])
def test_operations_outside_the_decoder_give_the_bits_of_single_calls(
    block: Callable[[LayerOps, Parts, Batch], FloatArray], num_threads: int
) -> None:
    ops = CpuOps(num_threads)
    parts = Parts(ops)
    rng = np.random.default_rng(4)
    batches = [replace(b, positions=rng.integers(0, 128, (len(b.token_ids), 3), np.int32)) for b in random_batches(rng)]
    forward = ops.capture(lambda to_call: lambda batch, _: block(to_call, parts, batch))
    kv = ops.make_kv(KvLayout(1, 1, 32), NUM_BLOCKS, BLOCK_SIZE)
    assert_equal([forward(batch, kv) for batch in batches], [block(ops, parts, batch) for batch in batches])


@pytest.mark.parametrize("positions", [np.zeros(3, np.int32), np.zeros((3, 2), np.int32)])
def test_a_batch_with_too_few_positions_is_refused(positions: IntArray) -> None:
    ops = CpuOps(1)
    parts = Parts(ops)
    forward = ops.capture(lambda to_call: lambda batch, _: block_of_an_encoder(to_call, parts, batch))
    batch = make_batch([Span(range(1), 0, 3, [1, 2, 3])], BLOCK_SIZE)
    with pytest.raises(ValueError, match="needs 3 positions"):
        forward(replace(batch, positions=positions), ops.make_kv(KvLayout(1, 1, 32), 1, BLOCK_SIZE))


def test_a_program_keeps_what_it_needs_alive() -> None:
    ops = CpuOps(2)
    batches = random_batches(np.random.default_rng(4))
    model = random_model(ops)
    expected = run(model.forward, ops, model, batches)
    forward = captured(random_model(ops), ops)
    gc.collect()
    assert_equal(run(forward, ops, model, batches), expected)


def test_the_reference_runs_the_pass_itself() -> None:
    ops = ReferenceOps()
    model = random_model(ops)
    batch = make_batch([Span(range(2), 0, 5, [1, 2, 3, 4, 5])], BLOCK_SIZE)
    forward = ops.capture(lambda to_call: model.with_ops(to_call).forward)
    kv = ops.make_kv(model.kv_layout, 2, BLOCK_SIZE)
    assert np.array_equal(forward(batch, kv), model.forward(batch, kv))


# ---- batches that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, token_ids=np.full_like(b.token_ids, VOCAB_SIZE)), "token id 64 is outside 0 .. 63"),
        (lambda b: replace(b, token_ids=np.full_like(b.token_ids, -1)), "token id -1"),
        (lambda b: replace(b, positions=b.positions + 128), "position 130 is outside 0 .. 127"),
        (lambda b: replace(b, positions=b.positions[1:].copy()), "positions must have 3 entries, not 2"),
        (lambda b: replace(b, kv_rows=b.kv_rows + 1000), "store row 1002"),
        (lambda b: replace(b, span_starts=b.span_starts[:1].copy()), "span_starts must have 2 entries"),
        (lambda b: replace(b, span_starts=np.array([0, 2], np.int32)), "span_starts must run from 0 to"),
        (lambda b: replace(b, context_lens=b.context_lens + 100), "103 tokens need 7 blocks"),
        (lambda b: replace(b, block_tables=b.block_tables - 1), "block -1 is outside"),
        (lambda b: replace(b, block_tables=b.block_tables + NUM_BLOCKS), "block 24 is outside"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change: Callable[[Batch], Batch], message: str) -> None:
    ops = CpuOps(2)
    model = random_model(ops)
    batch = make_batch([Span(range(1), 0, 3, [1, 2, 3])], BLOCK_SIZE)
    forward = captured(model, ops)
    with pytest.raises(ValueError, match=message):
        run(forward, ops, model, [change(batch)])
    assert_equal(run(forward, ops, model, [batch]), run(model.forward, ops, model, [batch]))


def test_a_store_of_other_heads_or_fewer_layers_is_refused() -> None:
    ops = CpuOps(1)
    model = random_model(ops)
    batch = make_batch([Span(range(1), 0, 1, [1])], BLOCK_SIZE)
    for layout in (replace(model.kv_layout, head_dim=16), replace(model.kv_layout, num_kv=1)):
        with pytest.raises(ValueError, match="heads differ"):
            captured(model, ops)(batch, ops.make_kv(layout, 1, BLOCK_SIZE))
    with pytest.raises(ValueError, match=r"layer 1 is outside 0 \.\. 0"):
        captured(model, ops)(batch, ops.make_kv(replace(model.kv_layout, num_layers=1), 1, BLOCK_SIZE))


# ---- passes that cannot be captured


def refused(forward: Callable[[LayerOps, Decoder, Batch, KvStore], Array], match: str) -> None:
    ops = CpuOps(1)
    model = random_model(ops)

    def build(to_call: LayerOps) -> Forward:
        return lambda batch, kv: forward(to_call, model, batch, kv)

    with pytest.raises(ValueError, match=match):
        ops.capture(build)


def test_arithmetic_of_its_own_is_refused() -> None:
    refused(lambda ops, m, b, kv: ops.linear(2 * ops.embed(b.token_ids, m.embedding), m.head), "its operations")  # noqa: ARG005
    refused(lambda ops, m, b, kv: ops.embed(b.token_ids, m.embedding)[:, :3], "its operations")  # noqa: ARG005


def test_another_batch_or_store_is_refused() -> None:
    def attend(ops: LayerOps, model: Decoder, batch: Batch, kv: KvStore) -> Array:
        qkv = ops.linear(ops.embed(batch.token_ids, model.embedding), model.layers[0].qkv)
        return ops.attention(qkv, model.spec.heads, kv, 0, batch, 1.0)

    refused(lambda ops, m, b, kv: attend(ops, m, replace(b), kv), "attention takes the batch")
    refused(lambda ops, m, b, kv: attend(ops, m, b, CpuOps(1).make_kv(m.kv_layout, 1, 16)), "attention takes the store")  # noqa: ARG005
    refused(lambda ops, m, b, kv: ops.embed(b.token_ids.copy(), m.embedding), "embed takes the token_ids")  # noqa: ARG005


def test_wrong_widths_are_refused_while_capturing() -> None:
    refused(
        lambda ops, m, b, kv: ops.linear(ops.embed(b.token_ids, m.embedding), m.layers[0].down),  # noqa: ARG005
        "x must have rows of 96 numbers, not 64",
    )


def test_experts_that_no_route_has_chosen_are_refused() -> None:
    def run(choice: Callable[[LayerOps, Parts, FloatArray], tuple[Any, Any]]) -> None:
        ops = CpuOps(1)
        parts = Parts(ops)

        def build(to_call: LayerOps) -> Forward:
            def forward(batch: Batch, _: Any) -> FloatArray:
                x = to_call.embed(batch.token_ids, parts.embedding)
                return to_call.experts(x, *choice(to_call, parts, x), parts.experts, Activation.SILU)

            return forward

        ops.capture(build)

    one = Routing(1, Scoring.SOFTMAX, renormalize=True)
    for choice in (
        lambda ops, parts, x: (ops.linear(x, parts.router), ops.linear(x, parts.router)),
        lambda ops, parts, x: ops.route(x, one),  # noqa: ARG005
    ):
        with pytest.raises(ValueError, match="no more than 9 experts"):
            run(choice)


def test_an_operation_that_programs_do_not_know_is_refused() -> None:
    ops = CpuOps(1)
    model = random_model(ops)
    with pytest.raises(AttributeError, match="take_rows"):
        ops.capture(lambda to_call: lambda batch, kv: to_call.take_rows(model.embedding, batch.logit_rows))  # type: ignore[attr-defined]  # noqa: ARG005
