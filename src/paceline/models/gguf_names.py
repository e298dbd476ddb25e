"""Tensor names of GGUF files."""

from __future__ import annotations

from paceline.models.spec import TensorNames

GGUF_ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotation's frequencies, for Llama 3's scaling: read with the spec, not packed."""

GGUF_NAMES = TensorNames(
    stems={
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attn_norm": "blk.{i}.attn_norm",
        "q": "blk.{i}.attn_q",
        "k": "blk.{i}.attn_k",
        "v": "blk.{i}.attn_v",
        "q_norm": "blk.{i}.attn_q_norm",
        "k_norm": "blk.{i}.attn_k_norm",
        "out": "blk.{i}.attn_output",
        "post_attn_norm": "blk.{i}.post_attention_norm",
        "ffn_norm": "blk.{i}.ffn_norm",
        "gate": "blk.{i}.ffn_gate",
        "up": "blk.{i}.ffn_up",
        "down": "blk.{i}.ffn_down",
        "post_ffn_norm": "blk.{i}.post_ffw_norm",
    },
    unused=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd\.weight"),
)
