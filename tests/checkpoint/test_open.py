from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import CheckpointFormat
from paceline.errors import CheckpointError
from paceline.tensors import Encoding
from support.gguf_files import write_gguf
from support.raw_tensors import encode


def gguf_file(path: Path, num_tensors: int = 1, tensors_per_part: int = 0) -> Path:
    tensors = [encode(np.zeros(4, np.float32), Encoding.F32, f"t{index}") for index in range(num_tensors)]
    write_gguf(path, {}, tensors, tensors_per_part=tensors_per_part)
    return path


def safetensors_folder(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_folder_with_safetensors_opens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(safetensors_folder(tmp_path))
    assert checkpoint.format is CheckpointFormat.SAFETENSORS
    assert list(checkpoint.tensors) == ["a"]


def test_a_gguf_file_opens_whatever_its_name(tmp_path: Path) -> None:
    for name in ("model.gguf", "sha256-0123"):
        checkpoint = open_checkpoint(gguf_file(tmp_path / name))
        assert checkpoint.format is CheckpointFormat.GGUF
        assert checkpoint.path == tmp_path / name


def test_a_folder_with_one_gguf_file_opens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("words")
    path = gguf_file(tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).path == path


def test_a_folder_with_one_split_gguf_opens(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", num_tensors=3, tensors_per_part=2)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "m-00001-of-00002.gguf"
    assert len(checkpoint.tensors) == 3


def test_safetensors_come_before_a_gguf_file_in_the_same_folder(tmp_path: Path) -> None:
    gguf_file(tmp_path / "model.gguf")
    assert open_checkpoint(safetensors_folder(tmp_path)).format is CheckpointFormat.SAFETENSORS


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    gguf_file(tmp_path / "one.gguf")
    gguf_file(tmp_path / "two.gguf", num_tensors=3, tensors_per_part=2)
    with pytest.raises(CheckpointError, match=r"several.*: one\.gguf, two-00001-of-00002\.gguf"):
        open_checkpoint(tmp_path)


def test_a_folder_without_a_model_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds no model.*model\.safetensors.*\.gguf"):
        open_checkpoint(tmp_path)


def test_a_path_to_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'nothing'}: no such file or folder")):
        open_checkpoint(tmp_path / "nothing")


def test_one_safetensors_file_leads_to_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"give its folder, {re.escape(str(tmp_path))}"):
        open_checkpoint(safetensors_folder(tmp_path) / "model.safetensors")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("what is written here is long enough")
    with pytest.raises(CheckpointError, match=r"notes\.txt: is not a GGUF file"):
        open_checkpoint(path)
