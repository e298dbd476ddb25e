"""The operations a processor must offer. A new processor is one file that passes ``tests/ops/test_conformance.py``.

Contract of every operation (``docs/numerics.md`` gives the reasons):

* **Rows.** A row's result depends on that row alone: bit for bit the same whatever the other rows are, how many there
  are, and how many threads run. Each docstring states the order in which an implementation accumulates.
* **Activations** are float32, C-contiguous, one row a token; T is the number of packed tokens of the step and may be 0.
* **Aliasing.** An operation returns a new array unless its docstring says "in place".
* **Errors.** Shapes and dtypes are the caller's duty; implementations check them where a wrong one could corrupt
  memory, and raise ``ValueError``. Ids and block numbers out of range are such cases.
* **Padding.** Nothing beyond the given lengths is ever read: block-table entries past the context, store rows not yet
  written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

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


class Activation(Enum):
    """The nonlinear function of a feed-forward layer (arXiv:1606.08415).

    ``SILU`` is x * sigmoid(x); ``GELU`` x * Phi(x), Phi being the normal distribution's; ``GELU_TANH`` and
    ``QUICK_GELU`` approximate Phi(x) by (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2 and by sigmoid(1.702 x).
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    QUICK_GELU = "quick_gelu"


class Scoring(Enum):
    """How a router's logits become scores of the experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses ``top_k`` experts for a token (:meth:`LayerOps.route`).

    ``renormalize`` makes a token's weights sum to 1, before they are multiplied by ``scale``. Experts come in
    ``num_groups`` groups of equal size, neighbours together; only those of the ``top_groups`` best can be chosen.
    """

    top_k: int
    scoring: Scoring
    renormalize: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class RopeStyle(Enum):
    """Which elements of a head are rotated together (arXiv:2104.09864).

    ``HALVES`` pairs element i with i + d/2; ``PAIRS`` pairs 2i with 2i + 1. d is the rotated width.
    """

    HALVES = "halves"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines by absolute position: both [max_positions, d / 2] float32; the first d elements rotate.

    Tokens of images have several positions (time, row, column; arXiv:2409.12191). ``axes`` [d / 2] int32 then says by
    which of them each pair turns; without it, all turn by the first.
    """

    cos: FloatArray
    sin: FloatArray
    style: RopeStyle
    axes: IntArray | None = None


class Linear(Protocol):
    """A packed weight matrix of N outputs and K inputs; its inner form belongs to the implementation.

    ``form`` names the stored form, for people ("f32", "bf16", "int8-g32", "int4-g32"); ``nbytes`` is what it occupies.
    """

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def form(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Lora(Protocol):
    """The packed low-rank updates of one linear layer."""

    @property
    def nbytes(self) -> int: ...


class Experts(Protocol):
    """The packed layers of E experts, each [H] -> [2 I] -> gated activation -> [H]."""

    @property
    def num_experts(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def form(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Embedding(Protocol):
    """A table of token vectors, [V, H]; rows may stay in the file's own encoding until they are looked up."""

    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class KvStore(Protocol):
    """Keys and values of all layers in blocks of ``block_size`` tokens; the implementation owns the inner format."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class StorageOps(Protocol):
    """How an implementation keeps weights, keys and values."""

    # ---- weights: once, at load

    def linear_form(self, encoding: Encoding, *, sensitive: bool = False) -> str:
        """The ``form`` in which :meth:`pack_linear` keeps a matrix that is stored like this."""

    def pack_linear(
        self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = (), *, sensitive: bool = False
    ) -> Linear:
        """Pack matrices [N_i, K], stacked along N, and as many biases [N_i] or none. Raises ValueError if K differs.

        Where the implementation quantises dense matrices, ``sensitive`` ones keep at least 8 bits.
        """

    def pack_lora(self, updates: Sequence[RawLora]) -> Lora:
        """Pack updates of one layer for :meth:`LayerOps.add_lora`; their outputs do not overlap.

        Matrices keep the precision that they are stored with. Raises ValueError if shapes do not fit together.
        """

    def pack_experts(self, gate_up: Sequence[Sequence[RawTensor]], down: Sequence[RawTensor]) -> Experts:
        """Pack for each expert the matrices that stack to its gate and up, [2 I, H], and its down matrix [H, I].

        :meth:`~paceline.tensors.RawTensor.matrix` takes a matrix out of a stacked tensor. Raises ValueError if shapes
        differ.
        """

    def pack_embedding(self, table: RawTensor) -> Embedding:
        """Prepare a [V, H] table for :meth:`embed`."""

    def vector(self, tensor: RawTensor, offset: float = 0.0) -> FloatArray:
        """A norm's weight or another vector as float32 [H], plus ``offset`` (Gemma stores weights minus one)."""

    # ---- keys and values

    def kv_block_bytes(self, layout: KvLayout, block_size: int) -> int:
        """Bytes of one block over all layers: the only place where this is computed."""

    def make_kv(self, layout: KvLayout, num_blocks: int, block_size: int) -> KvStore:
        """Allocate a store. Its content is undefined and never read before it is written."""


class LayerOps(Protocol):
    """What a model's forward pass may call. The module's docstring says what holds for all operations."""

    def embed(self, token_ids: IntArray, table: Any, scale: float = 1.0) -> FloatArray:
        """[T] ids -> [T, H]: the table's rows, dequantised, times ``scale``."""

    def linear(self, x: FloatArray, weight: Any) -> FloatArray:
        """[T, K] -> [T, N]: x @ weight.T + bias. Each output is one chain over k = 0..K-1, float32; bias added last."""

    def add_lora(self, y: FloatArray, x: FloatArray, lora: Any, rows: IntArray) -> None:
        """In place on the rows [R] of a linear layer's outputs y [T, N]: add the updates' outputs for inputs x [T, K].

        For each update: z = :meth:`linear` of x with down; each z times the scale, rounded; :meth:`linear` of that with
        up, added to y. ``rows`` ascend without repeating, and all other rows of y stay as they are. Raises ValueError
        for a row outside the arrays.
        """

    def rms_norm(self, x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        """[T, H]: x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); the sum runs in a fixed order over H."""

    def add_rms_norm(self, residual: FloatArray, update: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
        """``residual += update`` in place, then :meth:`rms_norm` of the new residual, returned."""

    def layer_norm(self, x: FloatArray, weight: FloatArray, bias: FloatArray, eps: float) -> FloatArray:
        """[T, H]: (x - mean) / sqrt(variance + eps) * weight + bias (arXiv:1607.06450); sums in a fixed order."""

    def add(self, x: FloatArray, update: FloatArray) -> None:
        """In place: ``x += update``."""

    def qk_norm(self, qkv: FloatArray, heads: Heads, q_weight: FloatArray, k_weight: FloatArray, eps: float) -> None:
        """In place on fused rows [T, heads.row]: :meth:`rms_norm` of each query and key head by itself."""

    def rope(self, qkv: FloatArray, heads: Heads, positions: IntArray, table: RopeTable) -> None:
        """In place on fused rows: rotate each query and key head by its token's position.

        ``positions`` is [T], or [T, A] for a table with axes 0 .. A - 1. For a pair (a, b) of the table's style with
        angle i: (a cos - b sin, b cos + a sin), each product rounded first. Raises ValueError for a position outside
        the table.
        """

    def write_kv(self, qkv: FloatArray, heads: Heads, kv: Any, layer: int, kv_rows: IntArray) -> None:
        """Store the key and value heads of row t as row ``kv_rows[t]`` of the layer. Rows are distinct."""

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
        """Fused rows -> [T, num_q * head_dim]: causal attention of every query head over the store (arXiv:1706.03762).

        The token at position p attends to positions max(0, p - window + 1) .. p (window 0: from 0). Query head h uses
        key head h // (num_q / num_kv). Scores are q.k * scale, then softcap * tanh(score / softcap) if softcap > 0.
        Keys and values are only read from the store, also those written in this step. Keys are visited in tiles at
        absolute positions, so that the result does not depend on how the sequence was cut into spans.
        """

    def gated_activation(self, gate_up: FloatArray, activation: Activation) -> FloatArray:
        """[T, 2 I] -> [T, I]: activation(first half) * second half."""

    def activate(self, x: FloatArray, activation: Activation) -> None:
        """In place: activation(x)."""

    def route(
        self, logits: FloatArray, routing: Routing, bias: FloatArray | None = None
    ) -> tuple[IntArray, FloatArray]:
        """[T, E] logits -> ids [T, top_k] int32 and weights [T, top_k] of each token's experts, the best one first.

        Experts are chosen by score + bias ([E], none: 0), the smaller id among equals; groups by the sum of their two
        largest score + bias (arXiv:2412.19437), the smaller number among equals. A weight is the score without bias;
        renormalised, over the sum of the chosen ones in their order + 1e-20; then times the scale. A row with a score
        + bias that is not finite gets the ids 0, 1, ... and NaN for its weights. Raises ValueError for a routing that
        does not fit E.
        """

    def experts(
        self, x: FloatArray, ids: IntArray, weights: FloatArray, experts: Any, activation: Activation
    ) -> FloatArray:
        """[T, H], choices [T, k] twice -> [T, H]: the weighted sum of the chosen experts' outputs.

        Each output is, bit for bit, what :meth:`linear`, :meth:`gated_activation` and :meth:`linear` make of the row.
        They are added to zero in the order of the choice. Raises ValueError for an id that is no expert's.
        """

    def softcap(self, x: FloatArray, cap: float) -> None:
        """In place: cap * tanh(x / cap)."""


Forward = Callable[[Batch, Any], FloatArray]
"""A model's pass over a batch and a store of keys and values: the T hidden states."""


class Ops(StorageOps, LayerOps, Protocol):
    """All that a processor offers."""

    @property
    def numerics(self) -> str:
        """Names everything that may change a bit: implementation, instruction path, number formats, version."""

    def capture(self, build: Callable[[LayerOps], Forward]) -> Forward:
        """A forward pass that is going to be run many times: ``build(ops)`` with the bits of ``build(self)``.

        ``build`` gets the operations that the pass shall call. They may be ones that write the calls down, with a batch
        of no tokens, so that what is returned can run them without going through Python: the pass calls operations
        only, always the same ones, whatever the values in its arrays. Raises ValueError for a pass that does not.
        What a batch's adapters add to that differs from batch to batch: it is run call by call.
        """

    # ---- encoders

    def encoder_attention(
        self, qkv: FloatArray, heads: Heads, segment_starts: IntArray, scale: float, softcap: float = 0.0
    ) -> FloatArray:
        """Fused rows -> [T, num_q * head_dim]: attention among the rows of each segment (an image, or a window of it).

        Rows segment_starts[s] .. segment_starts[s + 1] - 1 attend to each other, in both directions. ``segment_starts``
        is [S + 1] int32 and ascends from 0 to T, which otherwise raises ValueError. Query head h uses key head
        h // (num_q / num_kv); scores are those of :meth:`attention`. Keys are visited in tiles at positions from the
        start of the segment, so that a segment's rows depend on that segment alone.
        """

    # ---- the choice of tokens

    def take_rows(self, x: FloatArray, rows: IntArray) -> FloatArray:
        """[T, H], [R] -> [R, H]."""

    def edit_logits(self, logits: FloatArray, edits: LogitEdits) -> None:
        """In place on [R, V]: see :class:`~paceline.tensors.LogitEdits` for the order and the formulas.

        Each product, quotient, sum and difference is rounded to float32 by itself, from left to right.
        """

    def choose(self, logits: FloatArray, controls: ChoiceControls) -> IntArray:
        """[R, V] edited logits -> [R] token ids; -1 where no logit is finite or one is NaN or plus infinity.

        Greedy rows: the largest logit, the smaller id among equals. Other rows, in float32 unless said otherwise:
        z = (logit - row maximum) / temperature; min-p keeps z >= ln(min_p); top-k keeps the k largest z, ties by
        smaller id; top-p goes through what is left by descending z (ties by smaller id) and keeps a token while the
        probability mass before it is at most top_p, the mass being relative to the top-k survivors if top-k is on and
        to all tokens otherwise. A token's mass is exp(z) in float32; masses are summed in float64 and compared with
        top_p times the total. Of the tokens kept, the one with the largest z + gumbel(seed, position, id), summed in
        float64 (:mod:`paceline.ops.noise`), is chosen, the smaller id among equals.
        """

    def top_logprobs(self, logits: FloatArray, chosen: IntArray, k: int) -> TopLogprobs:
        """Log-softmax of [R, V] gathered at ``chosen`` [R] and at the min(k, V) largest of each row.

        The exponentials are summed in float64. Entries of minus infinity stay so; a row that has NaN or plus infinity,
        or nothing finite, gets NaN for all its values, its ids and rank undefined.
        """
