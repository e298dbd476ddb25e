"""GGUF files, written as llama.cpp's converter writes them, give what the model gave that they were made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.checkpoint.open import open_checkpoint
from paceline.models.registry import read_spec
from paceline.models.weights import count_parameters, load_model
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array, Encoding
from support.run_model import model_logits
from support.tiny_gguf import ARCHITECTURES, round_matrices, write_gguf
from support.tiny_models import TINY_MODELS, make_model, oracle_logits, random_prompt

# In a GGUF file the sliding layers follow the family's own pattern: a list of layers in the config cannot be written.
CONVERTIBLE = [
    name
    for name, (architecture, changes) in TINY_MODELS.items()
    if architecture in ARCHITECTURES and not changes.get("use_sliding_window") and "layer_types" not in changes
]

PROMPT = random_prompt(40)


def gguf_logits(path: Path) -> Array:
    return model_logits(load_model(open_checkpoint(path), ReferenceOps(), max_positions=64), PROMPT)


def assert_close(actual: Array, expected: Array) -> None:
    assert np.all(np.abs(actual - expected) <= 1e-4 * np.abs(expected).max(axis=1, keepdims=True))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_a_gguf_file_gives_the_logits_of_its_source(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    assert_close(gguf_logits(write_gguf(model, tmp_path / "model.gguf")), oracle_logits(model, PROMPT))


@pytest.mark.parametrize(
    "encoding",
    [Encoding.F16, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_0, Encoding.Q4_1, Encoding.Q5_0, Encoding.Q5_1],
    ids=lambda encoding: encoding.label,
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_quantised_weights_give_the_logits_of_the_rounded_model(name: str, encoding: Encoding, tmp_path: Path) -> None:
    model = make_model(name)
    path = write_gguf(model, tmp_path / "model.gguf", encoding)
    exact = oracle_logits(model, PROMPT)
    round_matrices(model, encoding)
    logits = gguf_logits(path)
    assert_close(logits, oracle_logits(model, PROMPT))
    assert not np.allclose(logits, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_both_formats_describe_the_same_model(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf"))
    ours, theirs = read_spec(folder), read_spec(file)
    for field in ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_layout", "max_position_embeddings",
                  "activation", "qkv_bias", "out_bias", "ffn_bias", "qk_norm", "sandwich_norms", "tied_head",
                  "embedding_scale", "final_softcap", "eos_token_ids", "bos_token_id"):  # fmt: skip
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [layer.window for layer in ours.layers] == [layer.window for layer in theirs.layers]
    assert np.isclose(ours.norm_eps, theirs.norm_eps)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.rope.dim, a.rope.theta) == (b.rope.dim, b.rope.theta)
        assert np.allclose(a.rope.divisors, b.rope.divisors, rtol=1e-6)
    assert ours.attention_scale == theirs.attention_scale
    assert count_parameters(folder) == count_parameters(file) == sum(p.numel() for p in model.parameters())
