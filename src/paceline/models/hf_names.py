"""Tensor names of safetensors checkpoints."""

from __future__ import annotations

from paceline.models.spec import TensorNames

_STEMS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "out": "model.layers.{i}.self_attn.o_proj",
    "ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
}

# With norms after the sublayers, "post_attention_layernorm" is the one that its name says; without, it is the next one.
_SANDWICH_STEMS = {
    **_STEMS,
    "post_attn_norm": "model.layers.{i}.post_attention_layernorm",
    "ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "post_ffn_norm": "model.layers.{i}.post_feedforward_layernorm",
}

# Old exports carry the frequencies of the rotation, which follow from the config.
_UNUSED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

HF_NAMES = TensorNames(_STEMS, _UNUSED)
HF_SANDWICH_NAMES = TensorNames(_SANDWICH_STEMS, _UNUSED)
