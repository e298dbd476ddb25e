"""Adapters that ``peft`` has written give what ``peft`` gives, computing in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from paceline.checkpoint.open import open_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.lora import load_adapter
from paceline.models.weights import load_model
from paceline.ops.api import Ops
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Array, Encoding
from support.run_model import model_greedy, model_logits
from support.tiny_adapters import adapt
from support.tiny_gguf import round_matrices, write_gguf
from support.tiny_models import make_model, oracle_logits, random_prompt, save_tiny

PROMPT = random_prompt(40)
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama-biases", {}),
    "qwen3": ("qwen3", {"r": 8, "lora_alpha": 4}),
    "ernie": ("ernie", {}),
    "gemma3": ("gemma3", {}),
    "queries-and-values": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "up-alone": ("llama", {"target_modules": ["up_proj"]}),
    "all-linear": ("qwen2", {"target_modules": "all-linear"}),
    "by-expression": ("llama", {"target_modules": r"(?i)MODEL\.layers\.[02]\..*\.(k|down)_proj|.*v_proj"}),
    "some-layers": ("llama", {"layers_to_transform": [0, 2]}),
    "but-some": ("llama", {"exclude_modules": ["layers.1.self_attn.k_proj", "gate_proj"]}),
    "but-by-expression": ("llama", {"exclude_modules": r".*\.1\..*|.*up_proj"}),
    "other-start": ("llama", {"init_lora_weights": "gaussian"}),
    "root-scaling": ("llama", {"use_rslora": True, "r": 8}),
    "patterns": (
        "llama",
        {
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.\w+": 7, "^model.layers.0.self_attn.q_proj": 16},
            "alpha_pattern": {"v_proj": 3.5, r"layers\.[01]\.self_attn\.k_proj": 8},
        },
    ),
}


@dataclass(frozen=True)
class Golden:
    adapted: peft.PeftModel
    model: Decoder


def load(path: Path, adapter: Path, ops: Ops) -> Decoder:
    checkpoint = open_checkpoint(path)
    adapters = {"tuned": load_adapter(adapter, checkpoint, ops)}
    return replace(load_model(checkpoint, ops, max_positions=128), adapters=adapters)


@pytest.fixture(scope="module", params=ADAPTERS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name, changes = ADAPTERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(name, folder / "base")
    plain = oracle_logits(make_model(name), PROMPT)
    adapted = adapt(make_model(name), **changes)
    assert not np.allclose(plain, oracle_logits(adapted, PROMPT), atol=0.3), "the adapter must change the logits"
    adapted.save_pretrained(folder / "adapter")
    return Golden(adapted, load(folder / "base", folder / "adapter", ReferenceOps()))


def assert_close(actual: Array, expected: Array, error: float = 1e-4) -> None:
    assert np.all(np.abs(actual - expected) <= error * np.abs(expected).max(axis=1, keepdims=True))


def test_logits_are_those_of_peft(golden: Golden) -> None:
    assert_close(model_logits(golden.model, PROMPT, adapter="tuned"), oracle_logits(golden.adapted, PROMPT))


def test_greedy_tokens_are_those_of_peft(golden: Golden) -> None:
    prompt = random_prompt(7, seed=8)
    tokens = model_greedy(golden.model, prompt, 30, adapter="tuned")
    assert len(set(tokens)) > 3
    expected = oracle_logits(golden.adapted, prompt + tokens).argmax(axis=1)
    assert tokens == expected[len(prompt) - 1 : -1].tolist()
    assert tokens != model_greedy(golden.model, prompt, 30)


def test_logits_have_the_same_bits_however_the_sequence_is_cut(golden: Golden) -> None:
    whole = model_logits(golden.model, PROMPT, adapter="tuned")
    for cuts in ([1], [17], list(range(1, 40))):
        assert np.array_equal(model_logits(golden.model, PROMPT, cuts, adapter="tuned"), whole)


def test_without_its_name_an_adapter_changes_no_bit(golden: Golden) -> None:
    plain = replace(golden.model, adapters={})
    assert np.array_equal(model_logits(golden.model, PROMPT), model_logits(plain, PROMPT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_adapters_are_computed_with_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base")
    adapted = adapt(make_model("llama"))
    exact = oracle_logits(adapted, PROMPT)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.to(dtype)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "base", tmp_path / "adapter", ReferenceOps())
    logits = model_logits(model, PROMPT, adapter="tuned")
    assert_close(logits, oracle_logits(adapted.float(), PROMPT))
    assert not np.allclose(logits, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.Q8_0, Encoding.Q4_1], ids=lambda e: e.label)
@pytest.mark.parametrize("name", ["llama", "llama-llama3-rope", "qwen2", "qwen3", "ernie", "gemma3"])
def test_adapters_fit_gguf_files(name: str, encoding: Encoding, tmp_path: Path) -> None:
    """Also where the file has the rows of queries and keys in an order of its own."""
    source = make_model(name)
    path = write_gguf(source, tmp_path / "model.gguf", encoding)
    if encoding is not Encoding.F32:
        round_matrices(source, encoding)
    adapted = adapt(source, r=3)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load(path, tmp_path / "adapter", ReferenceOps())
    assert_close(model_logits(model, PROMPT, adapter="tuned"), oracle_logits(adapted, PROMPT))


@pytest.mark.parametrize(("quantization", "error"), [(None, 0.03), ("int8", 0.1), ("int4", 0.6)])
def test_native_kernels_follow_peft(quantization: str | None, error: float, tmp_path: Path) -> None:
    """An adapter keeps its precision whatever becomes of the model's own matrices."""
    save_tiny("llama", tmp_path / "base")
    adapted = adapt(make_model("llama"), r=5)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "base", tmp_path / "adapter", CpuOps(1, quantization=quantization))
    expected, spread = oracle_logits(adapted, PROMPT), oracle_logits(adapted, PROMPT).std()
    assert np.sqrt(np.mean((model_logits(model, PROMPT) - expected) ** 2)) > spread
    assert np.sqrt(np.mean((model_logits(model, PROMPT, adapter="tuned") - expected) ** 2)) < error * spread
    assert forms(model) == {"f32"}


def forms(model: Decoder) -> set[str]:
    """In which the matrices of the adapter are kept."""
    loras = [lora for layer in model.adapters["tuned"].layers for lora in layer.values()]
    return {packed.form for lora in loras for packed in (lora.down, *(up for _, _, up in lora.ups))}


@pytest.mark.parametrize(("quantization", "form"), [(None, "bf16"), ("int8", "f32"), ("int4", "f32")])
def test_numerics_name_the_products_of_bfloat16_pairs_if_an_adapter_needs_them(
    quantization: str | None, form: str, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path / "base")
    adapt(make_model("llama")).to(torch.bfloat16).save_pretrained(tmp_path / "adapter")
    ops = CpuOps(1, quantization=quantization)
    assert forms(load(tmp_path / "base", tmp_path / "adapter", ops)) == {form}
    assert ops.numerics == CpuOps(1, "portable", quantization).numerics or form == "bf16"
