"""From the key-value pairs of a GGUF file to a spec."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.checkpoint.source import Checkpoint
from paceline.dequantize import to_float32
from paceline.errors import CheckpointError
from paceline.models.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields, common_head_dim, kv_heads
from paceline.models.gguf_names import GGUF_NAMES, GGUF_ROPE_DIVISORS
from paceline.models.rope import linear_divisors
from paceline.models.spec import LayerSpec, ModelSpec, RopeSpec
from paceline.ops.api import Activation, RopeStyle

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What the architecture implies and the file does not say.

    Attributes:
        rope_style: how the rows of queries and keys lie in the file, which is not always as in safetensors.
        interleaved_heads: the converter has put the rows of queries and keys that are rotated together side by side;
            in safetensors they lie in the halves of a head.
        window_pattern: one layer in so many sees everything, the others have the file's window. 0 means that no layer
            has one, even where the file names its width: so do llama.cpp's models of these architectures.
        local_theta: base of the rotation in sliding layers, if it is one of their own.
        scaled_embedding: token vectors are multiplied by the square root of the width.
        shared_scale_layers: the model of so many layers scales its scores by the hidden width shared among the heads,
            not by the width of a head.
    """

    rope_style: RopeStyle = RopeStyle.HALVES
    interleaved_heads: bool = False
    window_pattern: int = 0
    local_theta: float | None = None
    activation: Activation = Activation.SILU
    qk_norm: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    shared_scale_layers: int = 0


def read_gguf_spec(checkpoint: Checkpoint, architecture: str, family: GgufFamily) -> ModelSpec:
    """Raises CheckpointError, naming the key, for values that are absent, absurd or not supported."""
    source = str(checkpoint.path)
    keys = Fields(source, checkpoint.metadata, f"{architecture}.")
    tokenizer = Fields(source, checkpoint.metadata, "tokenizer.ggml.")
    if keys.has("expert_count") and keys.integer("expert_count", low=0):
        raise keys.error("expert_count", "is above 0, but mixtures of experts are not supported")

    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    num_layers = keys.integer("block_count", high=MAX_LAYERS)
    head_dim = _head_dim(keys)
    vocab_size = _vocab_size(checkpoint, hidden_size)
    full, local = _read_ropes(checkpoint, keys, family, head_dim)
    window, pattern = _window(keys, family)
    layers = tuple(
        LayerSpec(window, local) if window and (i + 1) % pattern else LayerSpec(0, full) for i in range(num_layers)
    )
    shared_scale = num_layers == family.shared_scale_layers
    ends = {token for key in _END_KEYS for token in tokenizer.token_ids(key, vocab_size)}
    bos = tokenizer.token_ids("bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=kv_heads(keys, "attention.head_count", "attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        activation=family.activation,
        layers=layers,
        attention_scale=(hidden_size / num_heads if shared_scale else head_dim) ** -0.5,
        attention_softcap=keys.number("attn_logit_softcapping") if keys.has("attn_logit_softcapping") else 0.0,
        final_softcap=keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else 0.0,
        embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else 1.0,
        qkv_bias=_has(checkpoint, "q", "bias"),
        out_bias=_has(checkpoint, "out", "bias"),
        ffn_bias=_has(checkpoint, "gate", "bias"),
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        tied_head=not _has(checkpoint, "head", "weight"),
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=bos[0] if bos else None,
    )


def _has(checkpoint: Checkpoint, stem: str, kind: str) -> bool:
    """Whether the file has a tensor, in the first layer if it is one of a layer's."""
    return f"{GGUF_NAMES.stems[stem].format(i=0)}.{kind}" in checkpoint.tensors


def _vocab_size(checkpoint: Checkpoint, hidden_size: int) -> int:
    name = f"{GGUF_NAMES.stems['embedding']}.weight"
    table = checkpoint.tensors.get(name)
    if table is None:
        raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing")
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise CheckpointError(f"{checkpoint.path}: tensor {name} has shape {table.shape}, not (tokens, {hidden_size})")
    return table.shape[0]


def _head_dim(keys: Fields) -> int:
    if not keys.has("attention.key_length"):
        head_dim = common_head_dim(keys, "embedding_length", "attention.head_count")
    else:
        head_dim = keys.integer("attention.key_length", high=MAX_HEAD_DIM)
        values = keys.integer("attention.value_length", head_dim)
        if values != head_dim:
            raise keys.error("attention.value_length", f"must equal attention.key_length {head_dim}, but is {values}")
    if head_dim % 2:
        raise keys.error("attention.key_length", f"must be even to be rotated, but is {head_dim}")
    return head_dim


def _window(keys: Fields, family: GgufFamily) -> tuple[int, int]:
    """The width of the sliding window, 0 for none, and the pattern of the layers that have it."""
    if not family.window_pattern or not keys.has("attention.sliding_window"):
        return 0, 1
    window = keys.integer("attention.sliding_window", low=0)
    return window, keys.integer("attention.sliding_window_pattern", family.window_pattern)


def _read_ropes(checkpoint: Checkpoint, keys: Fields, family: GgufFamily, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotation of layers that see everything, and that of sliding layers. Scaling is for the former alone if
    the latter have a base of their own."""
    theta = keys.number("rope.freq_base", 10_000.0)
    dim = keys.integer("rope.dimension_count", head_dim, high=head_dim)
    if dim % 2:
        raise keys.error("rope.dimension_count", f"must be even, but is {dim}")
    scaling = keys.text("rope.scaling.type", "none")
    if scaling == "none":
        divisors: tuple[float, ...] = ()
    elif scaling == "linear":
        divisors = linear_divisors(keys.number("rope.scaling.factor"), dim)
    else:
        raise keys.error("rope.scaling.type", f"{scaling!r} is not supported; none and linear are")

    stored = checkpoint.tensors.get(GGUF_ROPE_DIVISORS)
    if stored is not None:
        values = to_float32(stored)
        if values.shape != (dim // 2,) or not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {GGUF_ROPE_DIVISORS} must hold {dim // 2} positive numbers"
            )
        common = divisors or (1.0,) * (dim // 2)
        divisors = tuple(float(a) * b for a, b in zip(values, common, strict=True))
    full = RopeSpec(theta, dim, family.rope_style, divisors)
    if family.local_theta is None:
        return full, full
    return full, RopeSpec(keys.number("rope.freq_base_swa", family.local_theta), dim, family.rope_style)
