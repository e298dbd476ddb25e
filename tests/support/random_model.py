"""A small decoder with random weights, made without any framework: for tests of what surrounds a model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.models.decoder import Adapter, Decoder
from paceline.models.registry import read_spec, tensor_names
from paceline.models.weights import expected_tensors, load_model
from paceline.ops.api import Lora, Ops
from paceline.tensors import Encoding, FloatArray, RawLora, RawTensor

VOCAB_SIZE = 64
CONTEXT = 128


def random_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A checkpoint in memory with two layers, four query and two key-value heads: a llama, unless that is changed.

    Matrices are bfloat16.
    """
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    empty = Checkpoint(Path("random"), CheckpointFormat.SAFETENSORS, config, {})
    shapes = expected_tensors(read_spec(empty), tensor_names(empty))
    rng = np.random.default_rng(seed)
    return replace(empty, tensors={name: _random_tensor(name, shape, rng) for name, shape in shapes.items()})


def random_model(ops: Ops, seed: int = 0, **changes: Any) -> Decoder:
    return load_model(random_checkpoint(seed, **changes), ops, max_positions=CONTEXT)


def random_adapters(ops: Ops) -> dict[str, Adapter]:
    """Adapters for :func:`random_model` as it is without changes, each of some layers' linears.

    "wide" changes everything and is strong, "few" is bfloat16 and leaves half of the model alone.
    """
    spec = read_spec(random_checkpoint())
    q, kv, hidden, ffn = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size, 96
    outputs = {"qkv": [q, kv, kv], "out": [hidden], "gate_up": [ffn, ffn], "down": [hidden]}
    inputs = {"qkv": hidden, "out": q, "gate_up": hidden, "down": ffn}
    rng = np.random.default_rng(3)

    def lora(name: str, rank: int, *, rounded: bool, parts: slice) -> Lora:
        firsts = np.cumsum([0, *outputs[name]])
        return ops.pack_lora(
            [
                RawLora(
                    int(firsts[i]),
                    _matrix(f"{name}-{i}-down", (rank, inputs[name]), rng, rounded=rounded),
                    _matrix(f"{name}-{i}-up", (outputs[name][i], rank), rng, rounded=rounded),
                    scale=0.6,
                )
                for i in range(len(outputs[name]))[parts]
            ]
        )

    wide = [{name: lora(name, 3, rounded=False, parts=slice(None)) for name in outputs} for _ in range(2)]
    few = [{}, {name: lora(name, 16, rounded=True, parts=slice(1)) for name in ("qkv", "gate_up")}]
    return {"wide": Adapter(tuple(wide)), "few": Adapter(tuple(few))}


def _random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> RawTensor:
    # Wide enough that the logits tell the tokens apart, and that a wrong key or value anywhere changes them.
    scale = 1.0 if len(shape) == 1 or "embed" in name else 1.5 / math.sqrt(shape[1])
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    if len(shape) == 1:
        return RawTensor(name, shape, Encoding.F32, (1.0 + np.float32(0.1) * values).view(np.uint8))
    return _stored(name, values, rounded=True)


def _matrix(name: str, shape: tuple[int, int], rng: np.random.Generator, *, rounded: bool) -> RawTensor:
    values = (rng.standard_normal(shape) / math.sqrt(shape[1])).astype(np.float32)
    return _stored(name, values, rounded=rounded)


def _stored(name: str, values: FloatArray, *, rounded: bool) -> RawTensor:
    """As bfloat16 if ``rounded``: the upper halves of the numbers."""
    if not rounded:
        return RawTensor(name, values.shape, Encoding.F32, values.reshape(-1).view(np.uint8))
    upper_halves = values.reshape(-1).view(np.uint16)[1::2].copy()
    return RawTensor(name, values.shape, Encoding.BF16, upper_halves.view(np.uint8))
