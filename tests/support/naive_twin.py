"""A second oracle: a decoder in float64 that follows the spec literally, dense and without a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.checkpoint.source import Checkpoint
from paceline.models.registry import read_spec, tensor_names
from paceline.models.spec import LayerSpec, ModelSpec, RopeSpec
from paceline.ops.api import Activation, RopeStyle
from paceline.tensors import Array
from support.raw_tensors import decoded


def naive_logits(checkpoint: Checkpoint, token_ids: Sequence[int]) -> Array:
    """Logits of every position, [T, V] float64."""
    return NaiveTwin(checkpoint).logits(token_ids)


class NaiveTwin:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec: ModelSpec = read_spec(checkpoint)
        self._names = tensor_names(checkpoint)
        self._tensors = checkpoint.tensors

    def logits(self, token_ids: Sequence[int]) -> Array:
        spec = self.spec
        x = self._weight("embedding")[list(token_ids)] * spec.embedding_scale
        for i, layer in enumerate(spec.layers):
            update = self._attention(self._norm("attn_norm", x, i), i, layer)
            x = x + (self._norm("post_attn_norm", update, i) if spec.sandwich_norms else update)
            update = self._feed_forward(self._norm("ffn_norm", x, i), i)
            x = x + (self._norm("post_ffn_norm", update, i) if spec.sandwich_norms else update)
        logits = self._norm("final_norm", x) @ self._weight("embedding" if spec.tied_head else "head").T
        return _softcap(logits, spec.final_softcap)

    def _attention(self, x: Array, i: int, layer: LayerSpec) -> Array:
        spec, length = self.spec, len(x)
        q, k, v = (
            self._project(x, name, i, bias=spec.qkv_bias).reshape(length, -1, spec.head_dim) for name in ("q", "k", "v")
        )
        if spec.qk_norm:
            q, k = self._norm("q_norm", q, i), self._norm("k_norm", k, i)
        q, k = _rotate(q, layer.rope), _rotate(k, layer.rope)
        mixed = np.empty_like(q)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            for p in range(length):
                first = max(0, p - layer.window + 1) if layer.window else 0
                scores = k[first : p + 1, kv_head] @ q[p, head] * spec.attention_scale
                weights = np.exp(_softcap(scores, spec.attention_softcap))
                mixed[p, head] = weights @ v[first : p + 1, kv_head] / weights.sum()
        return self._project(mixed.reshape(length, -1), "out", i, bias=spec.out_bias)

    def _feed_forward(self, x: Array, i: int) -> Array:
        bias = self.spec.ffn_bias
        gate, up = self._project(x, "gate", i, bias=bias), self._project(x, "up", i, bias=bias)
        if self.spec.activation is Activation.SILU:
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        return self._project(gate * up, "down", i, bias=bias)

    def _project(self, x: Array, name: str, i: int, *, bias: bool) -> Array:
        out = x @ self._weight(name, i).T
        return out + self._tensor(name, "bias", i) if bias else out

    def _norm(self, name: str, x: Array, i: int = 0) -> Array:
        rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.spec.norm_eps)
        return x / rms * (self._weight(name, i) + self.spec.norm_offset)

    def _weight(self, name: str, i: int = 0) -> Array:
        return self._tensor(name, "weight", i)

    def _tensor(self, name: str, kind: str, i: int) -> Array:
        return decoded(self._tensors[f"{self._names.stems[name].format(i=i)}.{kind}"])


def _softcap(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def _rotate(x: Array, rope: RopeSpec) -> Array:
    """Each pair as a complex number, turned by its angle."""
    length, _, _ = x.shape
    out = x.copy()
    for i in range(rope.dim // 2):
        a, b = (i, i + rope.dim // 2) if rope.style is RopeStyle.HALVES else (2 * i, 2 * i + 1)
        angle = np.arange(length) * rope.theta ** (-2 * i / rope.dim) / (rope.divisors[i] if rope.divisors else 1)
        turned = (x[:, :, a] + 1j * x[:, :, b]) * np.exp(1j * angle)[:, None]
        out[:, :, a], out[:, :, b] = turned.real, turned.imag
    return out
