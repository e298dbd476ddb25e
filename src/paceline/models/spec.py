"""What a decoder is made of: one description for every family and both checkpoint formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.ops.api import Activation, RopeStyle
from paceline.tensors import Heads, KvLayout


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv:2104.09864).

    Attributes:
        theta: the base; angle i of position p is p * theta**(-2 i / dim) / divisors[i].
        dim: elements of a head that rotate, from the first on.
        style: which elements are rotated together.
        divisors: [dim / 2] numbers that stretch the context (linear and Llama 3 scaling); empty if there are none.
    """

    theta: float
    dim: int
    style: RopeStyle
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer: the attention window (0 is everything) and the positions' rotation."""

    window: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        architecture: the name in the checkpoint, for people.
        vocab_size: rows of the embedding and columns of the logits; a tokenizer may use fewer.
        max_position_embeddings: the context that the model was made for, in tokens.
        norm_offset: added to the stored norm weights (1 where the file holds the weights minus one).
        attention_scale: factor of the query-key products.
        attention_softcap, final_softcap: caps of scores and logits; 0 is none.
        embedding_scale: factor of the token vectors.
        qkv_bias, out_bias, ffn_bias: which projections have biases.
        qk_norm: each query and key head is normalised before it is rotated.
        sandwich_norms: attention and feed-forward are normalised after as well as before.
        tied_head: the embedding is also the output head.
        eos_token_ids: every id that config or generation config names as an end of sequence, ascending.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    attention_scale: float
    norm_offset: float = 0.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def kv_layout(self) -> KvLayout:
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def pair_cost(self) -> float:
        """Multiply-adds of one query with one earlier position, as a share of those of a token's matrix products.

        Layers with a window do not count: what they cost does not grow with the context.
        """
        projections = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        matrices = self.num_layers * (projections + 3 * self.hidden_size * self.intermediate_size)
        pairs = sum(layer.window == 0 for layer in self.layers) * 2 * self.num_heads * self.head_dim
        return pairs / matrices


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a checkpoint calls the tensors.

    Attributes:
        stems: our name -> the file's, without ``.weight`` or ``.bias``; ``{i}`` is the layer's number.
        unused: regular expressions of tensors that some files carry and nobody needs.
    """

    stems: Mapping[str, str]
    unused: tuple[str, ...] = ()
