"""A decoder-only language model, written once for every family. The arithmetic is in the operations alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from paceline.models.spec import ModelSpec
from paceline.ops.api import Embedding, KvStore, LayerOps, Linear, RopeTable
from paceline.tensors import Batch, FloatArray, KvLayout


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_layout(self) -> KvLayout: ...

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
class Decoder:
    """A model ready to run; :func:`paceline.models.weights.load_model` makes one from a checkpoint."""

    spec: ModelSpec
    ops: LayerOps
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: FloatArray
    head: Linear

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
            update = self._feed_forward(x, layer)
            x = ops.add_rms_norm(residual, update, next_norm, eps)
        return x

    def logits(self, hidden: FloatArray) -> FloatArray:
        logits = self.ops.linear(hidden, self.head)
        if self.spec.final_softcap:
            self.ops.softcap(logits, self.spec.final_softcap)
        return logits

    def _attention(self, x: FloatArray, index: int, layer: DecoderLayer, batch: Batch, kv: KvStore) -> FloatArray:
        ops, spec, heads = self.ops, self.spec, self.spec.heads
        qkv = ops.linear(x, layer.qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            ops.qk_norm(qkv, heads, layer.q_norm, layer.k_norm, spec.norm_eps)
        ops.rope(qkv, heads, batch.positions, layer.rope)
        ops.write_kv(qkv, heads, kv, index, batch.kv_rows)
        mixed = ops.attention(qkv, heads, kv, index, batch, spec.attention_scale, layer.window, spec.attention_softcap)
        update = ops.linear(mixed, layer.out)
        return update if layer.post_attn_norm is None else ops.rms_norm(update, layer.post_attn_norm, spec.norm_eps)

    def _feed_forward(self, x: FloatArray, layer: DecoderLayer) -> FloatArray:
        ops, spec = self.ops, self.spec
        gated = ops.gated_activation(ops.linear(x, layer.gate_up), spec.activation)
        update = ops.linear(gated, layer.down)
        return update if layer.post_ffn_norm is None else ops.rms_norm(update, layer.post_ffn_norm, spec.norm_eps)
