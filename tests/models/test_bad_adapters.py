"""Adapters that cannot be used: each is refused with the file and the item that is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline.checkpoint.open import open_checkpoint
from paceline.errors import CheckpointError
from paceline.models.lora import load_adapter
from paceline.ops.reference import ReferenceOps
from support.tiny_adapters import adapt
from support.tiny_models import make_model, save_tiny

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_tiny("llama", folder / "base")
    adapt(make_model("llama")).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def adapter(good: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(good / "adapter", tmp_path / "adapter")


def refused(good: Path, adapter: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_adapter(adapter, open_checkpoint(good / "base"), ReferenceOps())
    return str(caught.value)


def change_config(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(adapter: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_the_adapter_is_good_before_it_is_damaged(good: Path, adapter: Path) -> None:
    assert load_adapter(adapter, open_checkpoint(good / "base"), ReferenceOps()).nbytes > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported; only False is"),
        ({"bias": "all"}, "bias 'all' is not supported; only 'none' is"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; only 'LORA' is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices \[3\] is not supported"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported: it changes the"),
        ({"r": 0}, "r must be an integer from 1 to"),
        ({"r": "eight"}, "r must be an integer"),
        ({"r": None}, "r is missing"),
        ({"lora_alpha": -1}, "lora_alpha must be a number above 0"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj must be an integer from 1"),
        ({"rank_pattern": {"q_(proj": 2}}, r"rank_pattern: q_\(proj is no regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: q_proj must be a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": ["q_proj", 3]}, "target_modules must be a list of strings"),
        ({"target_modules": "(q_proj"}, "target_modules is no regular expression"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform must be numbers of layers"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            "target_modules names 'embed_tokens', which an adapter cannot change here; those that it can: down_proj, "
            "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        ({"target_modules": ["lm_head"]}, "target_modules names 'lm_head'"),
        ({"target_modules": ["proj"]}, "target_modules names 'proj'"),
    ],
    ids=str,
)
def test_settings_that_are_refused(good: Path, adapter: Path, changes: dict[str, Any], message: str) -> None:
    change_config(adapter, **changes)
    text = refused(good, adapter)
    assert text.startswith(f"{adapter / 'adapter_config.json'}: ")
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q0}.lora_A.weight"), f"missing: {Q0}.lora_A.weight"),
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), f"missing: {Q0}.lora_B.weight"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.ones(4, np.float32)}), "unknown: base_"),
        (lambda t: t.update({"x.lora_magnitude_vector": np.ones(4, np.float32)}), "unknown: x.lora_magnitude_vector"),
        (
            lambda t: t.update({f"{Q0}.lora_A.weight": np.ones((5, 96), np.float32)}),
            f"of the wrong shape: {Q0}.lora_A.weight is (5, 96), not (4, 96)",
        ),
        (
            lambda t: t.update({f"{Q0}.lora_B.weight": np.ones((4, 96), np.float32)}),
            f"of the wrong shape: {Q0}.lora_B.weight is (4, 96), not (96, 4)",
        ),
    ],
)
def test_tensors_that_are_refused(
    good: Path, adapter: Path, change: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    change_tensors(adapter, change)
    text = refused(good, adapter)
    assert text.startswith(f"{adapter / 'adapter_model.safetensors'}: ")
    assert message in text


def test_tensors_of_layers_that_are_not_changed_are_unknown(good: Path, adapter: Path) -> None:
    change_config(adapter, layers_to_transform=[0, 1])
    assert "unknown: base_model.model.model.layers.2.mlp.down_proj.lora_A.weight" in refused(good, adapter)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path, adapter: Path) -> None:
    save_tiny("mistral", tmp_path / "base")
    text = refused(tmp_path, adapter)
    assert f"{Q0}.lora_B.weight is (96, 4), not (128, 4)" in text


def test_files_that_are_missing_or_damaged_are_named(good: Path, adapter: Path, tmp_path: Path) -> None:
    assert refused(good, tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-40])
    assert "truncated" in refused(good, adapter)
    weights.write_bytes(b"nonsense" * 10)
    assert "is not a safetensors file" in refused(good, adapter)
    weights.unlink()
    assert refused(good, adapter).startswith(f"{weights}: cannot be read")
    (adapter / "adapter_model.bin").write_bytes(data)
    assert "is a pickle" in refused(good, adapter)
    (adapter / "adapter_config.json").write_text("{")
    assert refused(good, adapter).startswith(f"{adapter / 'adapter_config.json'}: is not valid JSON")
    (adapter / "adapter_config.json").unlink()
    assert refused(good, adapter).startswith(f"{adapter / 'adapter_config.json'}: cannot be read")
