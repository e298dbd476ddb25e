"""Tiny random checkpoints written by ``transformers``, one for each architecture and each switch of its config."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from paceline.tensors import Array

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "rope_parameters": _GEMMA_ROPES}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-mha": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "llama-linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 11}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"head_dim": 48, "attention_bias": True}),
    "ernie": ("Ernie4_5ForCausalLM", {"head_dim": 32}),
    "ernie-biases": ("Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3ForCausalLM", {**_GEMMA, "num_hidden_layers": 7, "num_key_value_heads": 1}),
    "gemma3-softcap": (
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""The architecture, and what its config changes."""


def make_model(name: str) -> PreTrainedModel:
    """In float32, with weights wide enough that the logits tell the tokens apart."""
    architecture, changes = TINY_MODELS[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**_SIZES, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(name.encode()))
    model = model_class(config).eval()
    scaled_embedding = architecture == "Gemma3ForCausalLM"
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
                if scaled_embedding and parameter_name == "model.norm.weight":
                    parameter.add_(5.0)  # makes up for the small head
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "embed" in parameter_name:
                # Small beside what the layers add, or a tied head would repeat the last token for ever.
                size = 0.2 / math.sqrt(config.hidden_size) if scaled_embedding else 0.5
                parameter.copy_(torch.randn_like(parameter) * size)
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / math.sqrt(parameter.shape[1]))
    return model


def save_tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
    """Write the checkpoint; the same weights each time but for the rounding to ``dtype``."""
    make_model(name).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_oracle(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers, computing in float32 whatever the weights are stored in."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model: PreTrainedModel = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def oracle_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Array:
    """Logits of every position, [T, V] float32."""
    with torch.inference_mode():
        logits: Array = model(torch.tensor([list(token_ids)])).logits[0].float().numpy()
    return logits


def random_prompt(length: int, vocab_size: int = _SIZES["vocab_size"], seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, length).tolist()
