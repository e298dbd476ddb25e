"""Tiny GGUF files from transformers models, by the conventions of llama.cpp's converter (``convert_hf_to_gguf.py``)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.models.rope import llama3_divisors
from paceline.tensors import Array, Encoding

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Gemma3ForCausalLM": "gemma3",
}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(model: PreTrainedModel, path: Path, encoding: Encoding = Encoding.F32) -> Path:
    """``encoding`` is for the matrices; vectors stay float32."""
    architecture = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, model, architecture)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        kind = gguf.GGMLQuantizationType[encoding.label if values.ndim == 2 else "F32"]
        array = _converted(name, values.numpy(), model, architecture)
        writer.add_tensor(_gguf_name(name, architecture), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_matrices(model: PreTrainedModel, encoding: Encoding) -> None:
    """Give the model the numbers that its matrices become in an encoding. A row's blocks are rounded by themselves."""
    kind = gguf.GGMLQuantizationType[encoding.label]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded))


def _add_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: str) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)

    # Tokens that spell nothing: llama.cpp does not open a file without a tokenizer.
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, config.vocab_size - 1)), "<0x0A>"]
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 4) + [6])

    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        divisors = llama3_divisors(rope["rope_theta"], config.head_dim, *(rope[key] for key in keys))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _gguf_name(name: str, architecture: str) -> str:
    names = _GEMMA_NAMES if architecture == "gemma3" else _NAMES
    stem, kind = name.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{kind}"


def _converted(name: str, values: Array, model: PreTrainedModel, architecture: str) -> Array:
    if architecture == "gemma3" and "norm" in name:
        return values + 1
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        # From halves to pairs: the two elements that are rotated together become neighbours.
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values
