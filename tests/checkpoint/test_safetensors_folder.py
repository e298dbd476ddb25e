from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

import paceline.checkpoint.safetensors_folder as reader
from paceline.checkpoint.safetensors_folder import open_safetensors_folder, read_safetensors
from paceline.checkpoint.source import CheckpointFormat
from paceline.dequantize import to_float32
from paceline.errors import CheckpointError
from paceline.tensors import Encoding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    return tmp_path


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_safetensors_folder(folder)
    message = str(caught.value)
    for word in (str(folder), *words):
        assert word in message
    assert len(message) < 800
    return message


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# What good folders hold


def test_tensors_of_each_type_come_back_as_the_library_wrote_them(folder: Path) -> None:
    torch.manual_seed(1)
    tensors = {
        "wide": torch.randn(3, 5),
        "half": torch.randn(2, 3, 4).half(),
        "brain": torch.randn(7, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_safetensors_folder(folder)
    assert checkpoint.format is CheckpointFormat.SAFETENSORS
    assert checkpoint.path == folder
    assert checkpoint.metadata == {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == set(tensors)
    encodings = {torch.float32: Encoding.F32, torch.float16: Encoding.F16, torch.bfloat16: Encoding.BF16}
    for name, tensor in tensors.items():
        read = checkpoint.tensors[name]
        assert (read.name, read.shape, read.encoding) == (name, tuple(tensor.shape), encodings[tensor.dtype])
        np.testing.assert_array_equal(to_float32(read), tensor.float().numpy())


def test_generation_config_is_read_if_it_is_there(folder: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert open_safetensors_folder(folder).generation_config == {"temperature": 0.6}


def test_tensors_stay_valid_after_the_checkpoint_and_the_file_are_gone(folder: Path) -> None:
    save_file({"a": np.arange(3, dtype=np.float32)}, folder / "model.safetensors")
    tensor = open_safetensors_folder(folder).tensors["a"]
    (folder / "model.safetensors").unlink()
    np.testing.assert_array_equal(to_float32(tensor), [0, 1, 2])
    assert not tensor.data.flags.writeable


# Shards


@pytest.fixture
def sharded(folder: Path) -> Path:
    save_file({"a": np.full(2, 1, np.float32), "b": np.full(2, 2, np.float32)}, folder / "model-1.safetensors")
    save_file({"c": np.full(2, 3, np.float32)}, folder / "model-2.safetensors")
    write_index(folder, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_shards_of_an_index_open_as_one(sharded: Path) -> None:
    tensors = open_safetensors_folder(sharded).tensors
    assert {name: float(to_float32(tensor)[0]) for name, tensor in tensors.items()} == {"a": 1, "b": 2, "c": 3}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    refused(sharded, "model-2.safetensors", "missing")


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": "model-1.safetensors", "c": "model-2.safetensors", "d": "model-2.safetensors"})
    refused(sharded, "'d'", "model-2.safetensors")
    write_index(sharded, {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    refused(sharded, "'a'", "model-2.safetensors")


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    save_file({"a": np.zeros(2, np.float32), "c": np.zeros(2, np.float32)}, sharded / "model-2.safetensors")
    refused(sharded, "'a'", "model-1.safetensors", "model-2.safetensors")


@pytest.mark.parametrize(
    "shard", ["../model-1.safetensors", "/etc/passwd", "sub/model-1.safetensors", "..", "", 7, None]
)
def test_a_shard_outside_the_folder_is_refused(sharded: Path, shard: Any) -> None:
    write_index(sharded, {"a": shard})
    refused(sharded, "'a'", repr(shard))


@pytest.mark.parametrize("weight_map", [None, [], {}, "model-1.safetensors"])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: Any) -> None:
    write_index(sharded, weight_map)
    refused(sharded, "weight_map")


# Folders that are refused


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_json_that_cannot_be_used_is_refused_with_the_files_name(folder: Path, text: bytes) -> None:
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_bytes(text)
    refused(folder, "generation_config.json", "JSON")
    (folder / "config.json").write_bytes(text)
    refused(folder, "/config.json", "JSON")
    (folder / "config.json").unlink()
    refused(folder, "/config.json", "No such file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"\1\0\0", ["3 bytes"]),
        (file(b"{}", length=3), ["3 bytes", "at most 2"]),
        (file(b"{}", length=2**63), [str(2**63), "at most 2"]),
        (file(b"GGUF"), ["header", "JSON"]),
        (file([]), ["header", "object"]),
        (file(b'{"a": 1, "a": 2}'), ["'a'", "twice"]),
        (file({"a": 1}), ["'a'", "object"]),
        (file({"a": entry(0, 2, [2], "I8")}, b"\0" * 2), ["'a'", "'I8'", "F32, F16, BF16"]),
        (file({"a": entry(0, 2, [2], ["F32"])}, b"\0" * 2), ["'a'", "['F32']"]),
        (file({"a": entry(0, 8, [-2])}, b"\0" * 8), ["'a'", "[-2]"]),
        (file({"a": entry(0, 8, [True, 2])}, b"\0" * 8), ["'a'", "[True, 2]"]),
        (file({"a": entry(0, 8, [2.0])}, b"\0" * 8), ["'a'", "[2.0]"]),
        (file({"a": entry(0, 4, [1] * 9)}, b"\0" * 4), ["'a'", "at most 8"]),
        (file({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, b"\0" * 8), ["'a'", "not 2"]),
        (file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, b"\0" * 8), ["'a'", "[0]"]),
        (file({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), ["'a'", "None"]),
        (file({"a": entry(8, 0)}, b"\0" * 8), ["'a'", "-8 bytes"]),
        (file({"a": entry(0, 4)}, b"\0" * 8), ["'a'", "8 bytes", "4 bytes"]),
        (file({"a": entry(0, 8, [2**40, 2**40])}, b"\0" * 8), ["'a'", str(2**82)]),
        (file({"a": entry(0, 2**62, [2**60])}, b"\0" * 8), ["'a'", str(2**62), "truncated"]),
        (file({"a": entry(0, 8)}, b"\0" * 7), ["'a'", "truncated"]),
        (file({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), ["'b'", "overlaps", "'a'"]),
        (file({"a": entry(0, 8), "b": entry(0, 8)}, b"\0" * 8), ["'b'", "overlaps", "'a'"]),
        (file({"a": entry(0, 8), "b": entry(12, 20)}, b"\0" * 20), ["'b'", "4 bytes"]),
        (file({"a": entry(0, 8)}, b"\0" * 9), ["'a'", "1 bytes after"]),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_the_item(folder: Path, content: bytes, words: list[str]) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors", *words)


def test_every_truncation_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros((2, 2), np.float16)}, path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.unlink()
        path.write_bytes(content[:length])
        refused(folder)


def test_a_header_beyond_the_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 10)
    (folder / "model.safetensors").write_bytes(file({"a": entry(0, 8)}, b"\0" * 8))
    refused(folder, "at most 10")


def test_a_file_without_tensors_has_none(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    path.write_bytes(file({"__metadata__": {"format": "pt"}}))
    assert read_safetensors(path) == {}
