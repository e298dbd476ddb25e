"""The array types that layers share: raw checkpoint tensors, and the description of one step's batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


class Encoding(Enum):
    """How a checkpoint stores numbers: name, elements of one block, bytes of one block."""

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def block_elements(self) -> int:
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        return self.value[2]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in its file.

    ``shape`` is in row-major order, the contiguous dimension last; ``data`` is a flat uint8 view of the memory map,
    ``prod(shape) / block_elements * block_bytes`` long. Blocks never cross a row.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    data: npt.NDArray[np.uint8]

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.encoding.block_elements * self.encoding.block_bytes

    def matrix(self, index: int) -> RawTensor:
        """Matrix ``index`` of a stack [E, N, K], still a view."""
        assert len(self.shape) == 3
        size = self.shape[1] * self.row_bytes
        part = self.data[index * size : (index + 1) * size]
        return RawTensor(f"{self.name}[{index}]", self.shape[1:], self.encoding, part)

    def rows(self, first: int, last: int) -> RawTensor:
        """Rows ``first .. last`` of a matrix, still a view."""
        assert len(self.shape) == 2
        part = self.data[first * self.row_bytes : last * self.row_bytes]
        return RawTensor(self.name, (last - first, self.shape[1]), self.encoding, part)


@dataclass(frozen=True, slots=True)
class RawLora:
    """A low-rank update of some outputs of a linear layer: ``scale`` * up @ down is added to their weights
    (arXiv:2106.09685).

    Attributes:
        first: the first of the N outputs that it changes.
        down: [r, K], from the layer's inputs.
        up: [N, r].
    """

    first: int
    down: RawTensor
    up: RawTensor
    scale: float


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer. A fused row holds ``num_q`` query, ``num_kv`` key, ``num_kv`` value heads."""

    num_q: int
    num_kv: int
    head_dim: int

    @property
    def row(self) -> int:
        return (self.num_q + 2 * self.num_kv) * self.head_dim

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_q, self.num_kv, self.head_dim


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What the store keeps for each token: keys and values of ``num_kv`` heads of ``head_dim`` in each layer."""

    num_layers: int
    num_kv: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The packed tokens ``rows`` [R] int32, ascending, that an adapter of the model is for."""

    name: str
    rows: IntArray


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, packed: the tokens of span 0, then those of span 1, and so on. T tokens, B spans.

    Attributes:
        token_ids: [T] int32.
        positions: [T] int32, absolute position of each token in its sequence; [T, A] for a model that rotates by A.
        kv_rows: [T] int32, row of the store (block * block_size + offset) that takes each token's key and value.
        span_starts: [B + 1] int32, first packed token of each span; the last entry is T.
        context_lens: [B] int32, tokens of the sequence that are in the store before this step.
        block_tables: [B, W] int32, store blocks of each sequence by position; unused entries are -1.
        logit_rows: [R] int32, packed tokens whose logits are wanted, ascending.
        adapters: each adapter that tokens are computed with, once; no token has two.
    """

    token_ids: IntArray
    positions: IntArray
    kv_rows: IntArray
    span_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: IntArray
    adapters: tuple[AdapterRows, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to the logits of R rows before a token is chosen, applied in the order of the fields.

    ``*_starts`` are [R + 1] int32 offsets into the flat lists that follow them: the entries of row r are
    ``starts[r] .. starts[r + 1]``. An id appears at most once in a row of one list.

    Attributes:
        vocab_size: ids at or above it can never be chosen (the head may be wider than the tokenizer).
        allowed_rows: [A] int32, rows with a list of allowed ids.
        allowed_bits: [A, ceil(V / 32)] uint32; bit i % 32 of word i // 32 is set where id i is allowed.
        bias_starts, bias_ids, bias_values: added to the logit, float32.
        seen_starts, seen_ids, seen_counts: ids in prompt or output, with their number of occurrences in the output.
        repetition, frequency, presence: [R] float32. For a seen id the logit z becomes z * repetition if z < 0, else
            z / repetition; then, if its count n > 0, z - n * frequency - presence.
        banned_starts, banned_ids: ids set to minus infinity (bad words; end tokens before ``min_tokens``).
    """

    vocab_size: int
    allowed_rows: IntArray
    allowed_bits: npt.NDArray[np.uint32]
    bias_starts: IntArray
    bias_ids: IntArray
    bias_values: FloatArray
    seen_starts: IntArray
    seen_ids: IntArray
    seen_counts: IntArray
    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray
    banned_starts: IntArray
    banned_ids: IntArray


@dataclass(frozen=True, slots=True)
class ChoiceControls:
    """How each of R rows chooses its token from its edited logits.

    Attributes:
        temperature: [R] float32; 0 is greedy.
        top_k: [R] int32; 0 is off.
        top_p: [R] float32; 1 is off.
        min_p: [R] float32; 0 is off.
        seeds: [R] uint64.
        positions: [R] int32, the position that the chosen token will have in its sequence.
    """

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    seeds: npt.NDArray[np.uint64]
    positions: IntArray


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of R rows: of the chosen token, and of the k likeliest (likeliest first, ties by smaller id).

    Attributes:
        chosen: [R] float32.
        ranks: [R] int32, entries of the row at least as large as the chosen one, itself included.
        top_ids: [R, k] int32.
        top_values: [R, k] float32.
    """

    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_values: FloatArray
