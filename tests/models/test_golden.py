"""Tiny random checkpoints of every architecture give what ``transformers`` gives, computing in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array
from support.batches import make_batch
from support.naive_twin import naive_logits
from support.run_model import model_greedy, model_logits
from support.tiny_models import TINY_MODELS, load_oracle, oracle_logits, random_prompt, save_tiny

LENGTH = 40
MAX_POSITIONS = 128


@dataclass(frozen=True)
class Golden:
    name: str
    folder: Path
    checkpoint: Checkpoint
    model: Decoder
    oracle: PreTrainedModel


@pytest.fixture(scope="module", params=TINY_MODELS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    checkpoint = open_checkpoint(folder)
    return Golden(request.param, folder, checkpoint, load(folder), load_oracle(folder))


def load(folder: Path) -> Decoder:
    return load_model(open_checkpoint(folder), ReferenceOps(), max_positions=MAX_POSITIONS)


def assert_close(actual: Array, expected: Array, error: float = 1e-4) -> None:
    """Within ``error`` of the largest logit of each row."""
    assert np.all(np.abs(actual - expected) <= error * np.abs(expected).max(axis=1, keepdims=True))


def test_logits_are_those_of_transformers(golden: Golden) -> None:
    prompt = random_prompt(LENGTH)
    logits = model_logits(golden.model, prompt)
    assert logits.std() > 0.5, "the logits must tell the tokens apart for this to mean anything"
    assert_close(logits, oracle_logits(golden.oracle, prompt))


def test_greedy_tokens_are_those_of_transformers(golden: Golden) -> None:
    """One pass of transformers over prompt and answer: each token is the likeliest after those before it."""
    prompt = random_prompt(7, seed=8)
    tokens = model_greedy(golden.model, prompt, 40)
    assert len(set(tokens)) > 5, "a loop of few tokens would prove little"
    expected = oracle_logits(golden.oracle, prompt + tokens).argmax(axis=1)
    assert tokens == expected[len(prompt) - 1 : -1].tolist()


def test_logits_are_those_of_the_naive_twin(golden: Golden) -> None:
    prompt = random_prompt(LENGTH, seed=6)
    assert_close(model_logits(golden.model, prompt), naive_logits(golden.checkpoint, prompt), 1e-5)


def test_logits_have_the_same_bits_however_the_sequence_is_cut(golden: Golden) -> None:
    prompt = random_prompt(LENGTH)
    whole = model_logits(golden.model, prompt)
    for cuts in ([1], [17], [5, 6, 30], list(range(1, LENGTH))):
        assert np.array_equal(model_logits(golden.model, prompt, cuts), whole)


def test_a_batch_without_tokens_is_legal(golden: Golden) -> None:
    model = golden.model
    hidden = model.forward(make_batch([], 16), model.ops.make_kv(model.kv_layout, 1, 16))
    assert hidden.shape == (0, model.spec.hidden_size)
    assert model.logits(hidden).shape == (0, model.spec.vocab_size)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_shards_give_what_one_file_gives(name: str, tmp_path: Path) -> None:
    single = save_tiny(name, tmp_path / "single")
    sharded = save_tiny(name, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    prompt = random_prompt(LENGTH)
    assert np.array_equal(model_logits(load(sharded), prompt), model_logits(load(single), prompt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_half_precision_weights_are_computed_with_in_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path, dtype)
    prompt = random_prompt(LENGTH)
    logits = model_logits(load(folder), prompt)
    assert_close(logits, oracle_logits(load_oracle(folder), prompt))
    assert not np.array_equal(logits, model_logits(load(save_tiny(name, tmp_path / "full")), prompt))


def test_attention_softcap_follows_the_naive_twin(tmp_path: Path) -> None:
    """transformers reads this setting of the config but does not apply it."""
    folder = save_tiny("gemma3", tmp_path)
    prompt = random_prompt(LENGTH)
    without = model_logits(load(folder), prompt)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 1.5}))
    logits = model_logits(load(folder), prompt)
    assert_close(logits, naive_logits(open_checkpoint(folder), prompt), 1e-5)
    assert not np.allclose(logits, without, rtol=1e-2)
