"""Each hot operation against the limit that binds it: reading memory, or multiplying.

    python benchmarks/kernels.py [--threads N] [--only linear attention]

The limits are those of ``limits.py``, measured first. An operation's limit is the larger of two times: its bytes at the
speed at which as many can be read, and its multiply-adds at the speed of vectors for its numbers (8-bit dots for
quantised weights, float32 for the rest), or of tiles for bfloat16 weights where the processor has them. With tiles,
quantised weights may be faster than the limit of vectors; scaling is what then limits them.
What else an operation does (exponentials, scales, rounding) stands in its time and not in its limit.

The layers' operations run as they do in a model: many of them in one native program, each on weights or on a layer of
keys and values of its own, which are not in the caches when there is much of it. The choice of tokens is called from
Python, as it is in a step. Times are the best of several. Run nothing beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from limits import Limits, measure_limits, print_limits
from measuring import best_seconds, machine, print_table
from paceline.ops.api import Activation, LayerOps, Linear, RopeStyle, RopeTable
from paceline.ops.cpu import CpuOps
from paceline.ops.threads import usable_cores
from paceline.runner.batch import build_batch
from paceline.slots import Slots
from paceline.tensors import Batch, ChoiceControls, Encoding, FloatArray, Heads, KvLayout, RawTensor
from paceline.types import SeqSpan, SeqStart, TokenRules

FORMS = {"int4": Encoding.Q4_1, "int8": Encoding.Q8_0, "bf16": Encoding.BF16}
SHAPES = {
    "qkv": (960, 576),
    "attention out": (576, 576),
    "gate and up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
    "square": (4096, 4096),
}
"""Outputs and inputs: SmolLM2-135M's matrices, and one of a larger model."""
ROWS = (1, 8, 32, 512)
HEADS = Heads(9, 3, 64)
HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
BLOCK_SIZE = 32
DECODES = [(context, batch) for context in (128, 1024, 8192) for batch in (1, 8, 32)]
PREFILLS = (512, 2048)
WORKING_SET = 128 << 20
"""Bytes of weights, or of keys and values, that are gone through in one run: more than caches hold."""
LAYERS = 30
MULTIPLICATIONS = 4e9
"""Multiply-adds in one run, about, where there are more than the working set needs."""
GROUPS = ("linear", "attention", "rows", "choice")

Body = Callable[[LayerOps, FloatArray, Batch, Any, int], object]
"""``body(ops, x, batch, kv, i)`` calls an operation for the i-th time; x is [T, width]."""


@dataclass(frozen=True)
class Measurement:
    """One operation's seconds, and what it has to do: bytes to move, and multiply-adds.

    ``working_set`` decides where the bytes come from, if that is more than themselves. ``peak`` is the speed of the
    multiply-adds, and its name.
    """

    name: str
    rows: int
    seconds: float
    moved: float
    working_set: float = 0
    macs: float = 0
    peak: tuple[float, str] = (1, "")

    def cells(self, limits: Limits) -> list[str]:
        memory = self.moved / limits.bandwidth(max(self.moved, self.working_set))
        arithmetic = self.macs / self.peak[0]
        limit, bound = max((memory, "memory"), (arithmetic, self.peak[1]))
        times = [f"{1e6 * self.seconds:.1f}", f"{1e6 * limit:.1f}", f"{limit / self.seconds:.0%}"]
        return [self.name, f"{self.rows}", *times, bound]


class Bench:
    """The operations under measurement, on so many threads."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ops = CpuOps(limits.threads)
        self.rng = np.random.default_rng(0)

    def seconds(self, body: Body, count: int, width: int, spans: Sequence[tuple[int, int]], layers: int = 1) -> float:
        """Seconds of one of ``count`` calls in a program, which begins with the rows that they work on.

        ``spans`` are the (start, count) of the sequences in the batch; the store has so many ``layers``.
        """
        table = self.ops.pack_embedding(random_matrix((64, width), Encoding.F32, self.rng))
        batch = batch_of(spans)
        layout = KvLayout(layers, HEADS.num_kv, HEADS.head_dim)
        kv = self.ops.make_kv(layout, int(batch.block_tables.max()) + 1, BLOCK_SIZE)
        words = kv.memory.reshape(-1).view(np.uint16)
        words[:] = np.resize(self.rng.standard_normal(1 << 16, np.float32).view(np.uint32) >> 16, words.shape)

        def run(calls: int) -> float:
            def build(ops: LayerOps) -> Callable[[Batch, Any], FloatArray]:
                def forward(batch: Batch, kv: Any) -> FloatArray:
                    x = ops.embed(batch.token_ids, table)
                    for i in range(calls):
                        body(ops, x, batch, kv, i)
                    return x

                return forward

            forward = self.ops.capture(build)
            return best_seconds(lambda: forward(batch, kv))

        return (run(count) - run(0)) / count

    def linear(self) -> Iterator[Measurement]:
        quantised = (self.limits.int8 or self.limits.fma, "8-bit dot" if self.limits.int8 else "float32")
        dense = max(
            (self.limits.bf16_tiles or 0, "bfloat16 tiles"),
            (self.limits.bf16 or 0, "bfloat16 dot"),
            (self.limits.fma, "float32"),
        )
        for form, encoding in FORMS.items():
            for name, shape in SHAPES.items():
                raw = random_matrix(shape, encoding, self.rng)
                weights = [self.ops.pack_linear([raw])]
                size = weights[0].nbytes
                weights += [self.ops.pack_linear([raw]) for _ in range(WORKING_SET // size)]
                for rows in ROWS:
                    macs = rows * shape[0] * shape[1]
                    used = weights[: max(2, int(MULTIPLICATIONS / macs))]
                    yield Measurement(
                        f"{form} {name} {shape[0]} × {shape[1]}",
                        rows,
                        self.seconds(_linear(used), len(used), shape[1], [(0, rows)]),
                        moved=size + 4 * rows * sum(shape),
                        working_set=size * len(used),
                        macs=macs,
                        peak=dense if form == "bf16" else quantised,
                    )

    def attention(self) -> Iterator[Measurement]:
        for context, batch in DECODES:
            yield self._attention(f"decode, context {context}", batch, [(context - 1, 1)] * batch)
        for count in PREFILLS:
            yield self._attention("prefill", count, [(0, count)])

    def _attention(self, name: str, rows: int, spans: list[tuple[int, int]]) -> Measurement:
        def body(ops: LayerOps, x: FloatArray, batch: Batch, kv: Any, i: int) -> object:
            return ops.attention(x, HEADS, kv, i, batch, scale=HEADS.head_dim**-0.5)

        keys = sum(start + i + 1 for start, count in spans for i in range(count))
        stored = sum(start + count for start, count in spans) * HEADS.num_kv * HEADS.head_dim * 2 * 2
        layers = max(1, min(LAYERS, WORKING_SET // stored))
        return Measurement(
            f"attention, {name}",
            rows,
            self.seconds(body, layers, HEADS.row, spans, layers),
            moved=stored,
            working_set=stored * layers,
            macs=2 * keys * HEADS.num_q * HEADS.head_dim,
            peak=(self.limits.fma, "float32"),
        )

    def rows(self) -> Iterator[Measurement]:
        weight = np.ones(HIDDEN, np.float32)
        angles = self.rng.standard_normal((max(ROWS), HEADS.head_dim // 2), np.float32)
        rope = RopeTable(np.cos(angles), np.sin(angles), RopeStyle.HALVES)
        q_and_k = (HEADS.num_q + HEADS.num_kv) * HEADS.head_dim
        k_and_v = 2 * HEADS.num_kv * HEADS.head_dim
        operations: list[tuple[str, int, int, Body]] = [  # name, width of the rows, bytes moved for each, call
            ("rms_norm", HIDDEN, 8 * HIDDEN, lambda ops, x, *_: ops.rms_norm(x, weight, 1e-5)),
            ("add_rms_norm", HIDDEN, 16 * HIDDEN, lambda ops, x, *_: ops.add_rms_norm(x, x, weight, 1e-5)),
            ("rope", HEADS.row, 8 * q_and_k, lambda ops, x, batch, *_: ops.rope(x, HEADS, batch.positions, rope)),
            ("write_kv", HEADS.row, 6 * k_and_v, lambda ops, x, b, kv, i: ops.write_kv(x, HEADS, kv, i, b.kv_rows)),
            (
                "gated_activation",
                2 * INTERMEDIATE,
                12 * INTERMEDIATE,
                lambda ops, x, *_: ops.gated_activation(x, Activation.SILU),
            ),
        ]
        for name, width, moved, body in operations:
            for rows in ROWS:
                yield Measurement(
                    name, rows, self.seconds(body, LAYERS, width, [(0, rows)], LAYERS), moved=rows * moved
                )

    def choice(self) -> Iterator[Measurement]:
        for rows in ROWS[:3]:
            logits = 4 * self.rng.standard_normal((rows, VOCABULARY), np.float32)
            calls: dict[str, Callable[[], object]] = {
                "choose, greedy": partial(self.ops.choose, logits, controls(rows, temperature=0)),
                "choose, top-k 40 and top-p 0.95": partial(self.ops.choose, logits, controls(rows, temperature=0.8)),
                "top_logprobs, 20": partial(self.ops.top_logprobs, logits, np.zeros(rows, np.int32), 20),
            }
            for name, call in calls.items():
                yield Measurement(name, rows, best_seconds(call), moved=logits.nbytes)


def _linear(weights: Sequence[Linear]) -> Body:
    return lambda ops, x, _batch, _kv, i: ops.linear(x, weights[i])


def controls(rows: int, temperature: float) -> ChoiceControls:
    return ChoiceControls(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, 40, np.int32),
        top_p=np.full(rows, 0.95, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        positions=np.zeros(rows, np.int32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure each operation against the machine's limits.")
    parser.add_argument("--threads", type=int, default=usable_cores()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    args = parser.parse_args()
    (limits,) = measure_limits([args.threads])
    bench = Bench(limits)
    print(f"{machine()}; {bench.ops.isa}\n")
    print_limits([limits])
    for group in args.only:
        rows = [measurement.cells(limits) for measurement in getattr(bench, group)()]
        print_table([group, "rows", "µs", "limit, µs", "of the limit", "bound by"], rows)


def batch_of(spans: Sequence[tuple[int, int]]) -> Batch:
    """One sequence for each (start, count), in blocks of its own."""
    longest = max(start + count for start, count in spans)
    slots = Slots(len(spans), longest, BLOCK_SIZE)
    first_block = 0
    for slot, (start, count) in enumerate(spans):
        length = start + count
        blocks = range(first_block, first_block := first_block - (-length // BLOCK_SIZE))
        tokens = tuple(i % 64 for i in range(length))
        slots.start(SeqStart(slot, tokens, length, start, tuple(blocks), TokenRules()))
    return build_batch([SeqSpan(slot, start, count) for slot, (start, count) in enumerate(spans)], slots)


def random_matrix(shape: tuple[int, int], encoding: Encoding, rng: np.random.Generator) -> RawTensor:
    """Random numbers as a file would hold them; those of a group in blocks have a common small scale."""
    if encoding in (Encoding.F32, Encoding.BF16):
        values = rng.standard_normal(shape, np.float32)
        data = values if encoding is Encoding.F32 else (values.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor("random", shape, encoding, data.reshape(-1).view(np.uint8))
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // encoding.block_elements, encoding.block_bytes), np.uint8)
    # The float16 numbers before the codes: the scale, and the minimum if there is one.
    before = (encoding.block_bytes - (16 if encoding is Encoding.Q4_1 else 32)) // 2
    blocks[:, : 2 * before] = np.full(before, 0.01, np.float16).view(np.uint8)
    return RawTensor("random", shape, encoding, blocks.reshape(-1))


if __name__ == "__main__":
    main()
