"""A decoder-only language model, written once for every family. The arithmetic is in the operations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.models.spec import ModelSpec
from paceline.ops.api import Embedding, KvStore, LayerOps, Linear, Lora, RopeTable
from paceline.tensors import Batch, FloatArray, KvLayout


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_layout(self) -> KvLayout: ...

    @property
    def adapters(self) -> Mapping[str, Adapter]: ...

    def with_ops(self, ops: LayerOps) -> Model:
        """The same model, calling other operations; its weights must be theirs."""

    def forward(self, batch: Batch, kv: KvStore) -> FloatArray:
        """Run the batch's T tokens, writing their keys and values to the store: normalised hidden states [T, H]."""

    def logits(self, hidden: FloatArray) -> FloatArray:
        """[R, H] rows of hidden states -> [R, V] float32."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The packed weights of one layer. Optional parts are None: query and key norms, norms after the sublayers."""

    rope: RopeTable
    window: int
    attn_norm: FloatArray
    qkv: Linear
    q_norm: FloatArray | None
    k_norm: FloatArray | None
    out: Linear
    post_attn_norm: FloatArray | None
    ffn_norm: FloatArray
    gate_up: Linear
    down: Linear
    post_ffn_norm: FloatArray | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank updates of a model's linear layers; :func:`paceline.models.lora.load_adapter` makes one from its files.

    ``layers`` has for each layer of the model the updates by the name of the linear layer in :class:`DecoderLayer`.
    """

    layers: tuple[Mapping[str, Lora], ...]

    @property
    def nbytes(self) -> int:
        return sum(lora.nbytes for layer in self.layers for lora in layer.values())


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model ready to run; :func:`paceline.models.weights.load_model` makes one from a checkpoint.

    ``adapters`` are those that a batch may name.
    """

    spec: ModelSpec
    ops: LayerOps
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: FloatArray
    head: Linear
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def kv_layout(self) -> KvLayout:
        return self.spec.kv_layout

    def with_ops(self, ops: LayerOps) -> Decoder:
        return replace(self, ops=ops)

    def forward(self, batch: Batch, kv: KvStore) -> FloatArray:
        ops, eps = self.ops, self.spec.norm_eps
        residual = ops.embed(batch.token_ids, self.embedding, self.spec.embedding_scale)
        x = ops.rms_norm(residual, self.layers[0].attn_norm, eps)
        # Each norm is fused with the addition before it, so a layer ends with the norm that the next one starts with.
        next_norms = [*(layer.attn_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            update = self._attention(x, index, layer, batch, kv)
            x = ops.add_rms_norm(residual, update, layer.ffn_norm, eps)
            update = self._feed_forward(x, index, layer, batch)
            x = ops.add_rms_norm(residual, update, next_norm, eps)
        return x

    def logits(self, hidden: FloatArray) -> FloatArray:
        logits = self.ops.linear(hidden, self.head)
        if self.spec.final_softcap:
            self.ops.softcap(logits, self.spec.final_softcap)
        return logits

    def _attention(self, x: FloatArray, index: int, layer: DecoderLayer, batch: Batch, kv: KvStore) -> FloatArray:
        ops, spec, heads = self.ops, self.spec, self.spec.heads
        qkv = self._linear(x, layer.qkv, "qkv", index, batch)
        if layer.q_norm is not None and layer.k_norm is not None:
            ops.qk_norm(qkv, heads, layer.q_norm, layer.k_norm, spec.norm_eps)
        ops.rope(qkv, heads, batch.positions, layer.rope)
        ops.write_kv(qkv, heads, kv, index, batch.kv_rows)
        mixed = ops.attention(qkv, heads, kv, index, batch, spec.attention_scale, layer.window, spec.attention_softcap)
        update = self._linear(mixed, layer.out, "out", index, batch)
        return update if layer.post_attn_norm is None else ops.rms_norm(update, layer.post_attn_norm, spec.norm_eps)

    def _feed_forward(self, x: FloatArray, index: int, layer: DecoderLayer, batch: Batch) -> FloatArray:
        ops, spec = self.ops, self.spec
        gated = ops.gated_activation(self._linear(x, layer.gate_up, "gate_up", index, batch), spec.activation)
        update = self._linear(gated, layer.down, "down", index, batch)
        return update if layer.post_ffn_norm is None else ops.rms_norm(update, layer.post_ffn_norm, spec.norm_eps)

    def _linear(self, x: FloatArray, weight: Linear, name: str, index: int, batch: Batch) -> FloatArray:
        """A linear layer of layer ``index``, and what the batch's adapters add to it."""
        y = self.ops.linear(x, weight)
        for used in batch.adapters:
            lora = self.adapters[used.name].layers[index].get(name)
            if lora is not None:
                self.ops.add_lora(y, x, lora, used.rows)
        return y
