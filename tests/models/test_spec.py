"""Configs in all their spellings give one spec; what is absurd or not supported is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError
from paceline.models.registry import GGUF_FAMILIES, HF_FAMILIES, read_spec
from paceline.models.spec import ModelSpec
from paceline.ops.api import Activation, RopeStyle
from paceline.tensors import Encoding
from support.raw_tensors import encode

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
GEMMA = {
    **{key: value for key, value in LLAMA.items() if key != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "num_hidden_layers": 7,
    "sliding_window": 16,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 512,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 24,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def folder_spec(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    return read_spec(Checkpoint(Path("/models/tiny"), CheckpointFormat.SAFETENSORS, config, {}, generation or {}))


def gguf_spec(metadata: dict[str, Any], **tensors: np.ndarray) -> ModelSpec:
    raw = {"token_embd.weight": encode(np.zeros((64, 96), np.float32), Encoding.F32)}
    raw |= {name.replace("__", "."): encode(values, Encoding.F32) for name, values in tensors.items()}
    return read_spec(Checkpoint(Path("/models/tiny.gguf"), CheckpointFormat.GGUF, metadata, raw))


def refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        folder_spec(config)
    for word in ("/models/tiny", *words):
        assert word in str(error.value)


# ---- safetensors folders


def test_sizes_and_defaults_of_a_plain_config() -> None:
    spec = folder_spec(LLAMA)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 96, 160, 4)
    assert (spec.heads.num_q, spec.heads.num_kv, spec.heads.head_dim) == (4, 2, 24)
    assert spec.kv_layout.num_layers == 4
    assert spec.attention_scale == 24**-0.5
    assert spec.activation is Activation.SILU
    assert {(layer.window, layer.rope.theta, layer.rope.style) for layer in spec.layers} == {
        (0, 10_000.0, RopeStyle.HALVES)
    }
    assert not any((spec.tied_head, spec.qkv_bias, spec.qk_norm, spec.sandwich_norms, spec.final_softcap))


def test_without_a_number_of_key_heads_there_are_as_many_as_query_heads() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert folder_spec(config).num_kv_heads == 4


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_old_and_new_spellings_of_the_rotation_agree(type_key: str) -> None:
    for kind in ("llama3", "linear"):
        numbers = LLAMA3 if kind == "llama3" else {"factor": 4.0}
        old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {type_key: kind, **numbers}, "torch_dtype": "bfloat16"}
        new = {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **numbers}, "dtype": "bfloat16"}
        assert folder_spec(old) == folder_spec(new)
        assert len(folder_spec(old).layers[0].rope.divisors) == 12


def test_a_null_scaling_is_none() -> None:
    assert folder_spec({**LLAMA, "rope_scaling": None}) == folder_spec(LLAMA)
    assert folder_spec({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}) == folder_spec(LLAMA)


def test_old_and_new_spellings_of_two_rotations_agree() -> None:
    old = {
        **GEMMA,
        "rope_theta": 2e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    new = {
        **GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(7)],
    }
    spec = folder_spec(old)
    assert spec == folder_spec(new)
    assert [layer.window for layer in spec.layers] == [16, 16, 0, 16, 16, 0, 16]
    assert (spec.layers[0].rope.theta, spec.layers[0].rope.divisors) == (5e3, ())
    assert (spec.layers[2].rope.theta, spec.layers[2].rope.divisors) == (2e6, (8.0,) * 16)


def test_gemma_is_described_by_switches() -> None:
    spec = folder_spec({**GEMMA, "query_pre_attn_scalar": 168, "final_logit_softcapping": 30.0})
    assert (spec.attention_scale, spec.final_softcap, spec.attention_softcap) == (168**-0.5, 30.0, 0.0)
    assert (spec.norm_offset, spec.embedding_scale) == (1.0, 96**0.5)
    assert spec.sandwich_norms
    assert spec.qk_norm
    assert spec.tied_head
    assert [layer.window for layer in spec.layers] == [16, 16, 16, 16, 16, 0, 16]


def test_a_switched_off_window_is_none() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 3}
    assert {layer.window for layer in folder_spec(qwen).layers} == {0}
    assert [layer.window for layer in folder_spec({**qwen, "use_sliding_window": True}).layers] == [0, 0, 0, 8]
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert {layer.window for layer in folder_spec({**mistral, "sliding_window": None}).layers} == {0}
    assert {layer.window for layer in folder_spec({**mistral, "sliding_window": 8}).layers} == {8}


def test_both_names_of_ernie_are_the_same_model() -> None:
    first, second = (folder_spec({**LLAMA, "architectures": [f"Ernie4_5{x}ForCausalLM"]}) for x in ("", "_"))
    assert first.layers[0].rope.style is RopeStyle.PAIRS
    assert first.layers[0].rope.theta == 500_000.0
    assert replace(second, architecture=first.architecture) == first


def test_end_tokens_are_those_of_config_and_generation_config_together() -> None:
    spec = folder_spec({**LLAMA, "eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [7, 2, 5]})
    assert spec.eos_token_ids == (2, 5, 7)
    assert spec.bos_token_id == 1
    assert folder_spec({**LLAMA, "eos_token_id": None}).eos_token_ids == ()
    assert folder_spec(LLAMA).bos_token_id is None


@pytest.mark.parametrize("architectures", [["BertModel"], [], None, "LlamaForCausalLM", [3]])
def test_an_unknown_architecture_is_named_with_those_that_work(architectures: Any) -> None:
    named = "BertModel" if architectures == ["BertModel"] else "not supported"
    refused({**LLAMA, "architectures": architectures}, named, *HF_FAMILIES)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "max_position_embeddings", "head_dim"],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -4, 2**40, "96", 96.0, True, [96]])
def test_absurd_sizes_are_refused_by_their_key(key: str, value: Any) -> None:
    refused({**LLAMA, key: value}, "config.json", key)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "rms_norm_eps", "hidden_act"])
def test_a_missing_key_is_named(key: str) -> None:
    refused({name: value for name, value in LLAMA.items() if name != key}, key, "missing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 5}, ("num_attention_heads", "divide", "96")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "divide", "4")),
        ({"head_dim": 33}, ("head_dim", "even")),
        ({"hidden_act": "relu"}, ("hidden_act", "relu", "silu")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
        ({"rms_norm_eps": 0}, ("rms_norm_eps",)),
        ({"rope_theta": "big"}, ("rope_theta",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("rope_scaling", "yarn", "llama3")),
        ({"rope_scaling": {"rope_type": "longrope"}}, ("longrope", "linear")),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_parameters", "dynamic")),
        ({"rope_scaling": {"type": "linear"}}, ("factor", "missing")),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ("factor",)),
        ({"rope_scaling": "linear"}, ("rope_scaling", "object")),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings",)),
        ({"eos_token_id": 64}, ("eos_token_id", "63")),
        ({"eos_token_id": [1, -1]}, ("eos_token_id", "-1")),
        ({"eos_token_id": "</s>"}, ("eos_token_id",)),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused({**LLAMA, **changes}, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"]}, ("layer_types", "7 layers")),
        ({"layer_types": ["chunked_attention"] * 7}, ("layer_types", "chunked_attention")),
        ({"layer_types": "full_attention"}, ("layer_types",)),
        ({"sliding_window": None}, ("sliding_window", "missing")),
        ({"sliding_window": 0}, ("sliding_window",)),
        ({"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
    ],
)
def test_layers_that_cannot_be_made_are_refused_by_their_key(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused({**GEMMA, **changes}, *words)


# ---- GGUF files


def test_a_gguf_file_says_what_a_config_says() -> None:
    spec = gguf_spec({**GGUF, "llama.rope.freq_base": 1e5})
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 96, 160, 4)
    assert (spec.heads.num_q, spec.heads.num_kv, spec.heads.head_dim) == (4, 2, 24)
    assert {(layer.window, layer.rope.theta, layer.rope.style) for layer in spec.layers} == {(0, 1e5, RopeStyle.PAIRS)}
    assert spec.tied_head
    assert not gguf_spec(GGUF, output__weight=np.zeros((64, 96), np.float32)).tied_head


def test_every_end_token_of_a_gguf_file_counts() -> None:
    ids = {"eos_token_id": 2, "eot_token_id": 9, "eom_token_id": 5, "bos_token_id": 1}
    spec = gguf_spec({**GGUF, **{f"tokenizer.ggml.{key}": value for key, value in ids.items()}})
    assert spec.eos_token_ids == (2, 5, 9)
    assert spec.bos_token_id == 1


def test_stored_divisors_of_the_rotation_are_used() -> None:
    divisors = np.linspace(1, 8, 12).astype(np.float32)
    spec = gguf_spec(GGUF, rope_freqs__weight=divisors)
    assert np.array_equal(np.float32(spec.layers[0].rope.divisors), divisors)
    for bad in (divisors[:5], divisors * 0, divisors * np.float32(np.nan)):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            gguf_spec(GGUF, rope_freqs__weight=bad)


def test_gemma_files_follow_the_familys_pattern() -> None:
    gemma = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    gemma |= {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.attention.sliding_window": 16,
        "gemma3.attention.key_length": 32,
        "gemma3.attention.value_length": 32,
        "gemma3.rope.dimension_count": 32,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    spec = gguf_spec(gemma)
    assert [i for i, layer in enumerate(spec.layers) if layer.window == 0] == list(range(5, 62, 6))
    assert (spec.layers[5].rope.divisors, spec.layers[0].rope.divisors) == ((8.0,) * 16, ())
    assert spec.norm_offset == 0.0
    assert spec.attention_scale == (96 / 4) ** -0.5
    assert gguf_spec({**gemma, "gemma3.block_count": 7}).attention_scale == 32**-0.5
    without = gguf_spec({key: value for key, value in gemma.items() if "window" not in key})
    assert {layer.window for layer in without.layers} == {0}


def test_a_window_that_the_family_does_not_use_is_left_alone() -> None:
    assert gguf_spec({**GGUF, "llama.attention.sliding_window": 16}) == gguf_spec(GGUF)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, ("mamba", *GGUF_FAMILIES)),
        ({"general.architecture": None}, ("None", *GGUF_FAMILIES)),
        ({"llama.block_count": None}, ("llama.block_count", "missing")),
        ({"llama.block_count": 2**31}, ("llama.block_count",)),
        ({"llama.attention.head_count": 0}, ("llama.attention.head_count",)),
        ({"llama.attention.head_count_kv": [2, 2, 2, 2]}, ("llama.attention.head_count_kv",)),
        ({"llama.attention.head_count_kv": 3}, ("llama.attention.head_count_kv", "divide")),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 16}, ("value_length", "32")),
        ({"llama.rope.dimension_count": 25}, ("llama.rope.dimension_count",)),
        ({"llama.rope.dimension_count": 48}, ("llama.rope.dimension_count", "24")),
        ({"llama.rope.scaling.type": "yarn"}, ("llama.rope.scaling.type", "yarn")),
        ({"llama.expert_count": 8}, ("llama.expert_count",)),
        ({"llama.embedding_length": 48, "llama.rope.dimension_count": 12}, ("token_embd.weight", "(64, 96)", "48")),
        ({"tokenizer.ggml.eos_token_id": 64}, ("tokenizer.ggml.eos_token_id", "63")),
    ],
)
def test_what_does_not_fit_in_a_gguf_file_is_refused_by_its_key(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as error:
        gguf_spec({**GGUF, **changes})
    for word in ("/models/tiny.gguf", *words):
        assert word in str(error.value)
