from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import paceline.checkpoint.gguf as reader
from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.source import CheckpointFormat
from paceline.dequantize import to_float32
from paceline.errors import CheckpointError
from paceline.tensors import Encoding, RawTensor
from support.gguf_files import (
    ARRAY,
    BOOL,
    STRING,
    U8,
    U32,
    U64,
    array,
    entry,
    pair,
    raw_gguf,
    text,
    write_gguf,
)  # fmt: skip
from support.raw_tensors import encode, random_tensor


def f32(name: str, *shape: int) -> RawTensor:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return encode(values, Encoding.F32, name)


def refused(path: Path, content: bytes, *words: str) -> str:
    """Writes the bytes, checks that opening is refused with a message that names the file and holds the words."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    assert len(message) < 800
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# What good files hold


def test_metadata_of_every_type_comes_back(path: Path) -> None:
    numbers = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True,
    }  # fmt: skip
    lists = {
        "strings": ["", "a", "日本語 🦊", "\n"],
        "integers": [1, -2, 3],
        "floats": [0.5, -1.25],
        "booleans": [True, False],
        "nested": [[1, 2], [3], [4, 5, 6]],
    }
    write_gguf(
        path, {**{key: (key, number) for key, number in numbers.items()}, **lists, "text": "größer"}, [f32("t", 2)]
    )
    metadata = open_gguf(path).metadata
    for key, value in {**numbers, **lists, "text": "größer", "general.architecture": "llama"}.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)


@pytest.mark.parametrize("encoding", Encoding, ids=lambda encoding: encoding.label)
def test_tensors_of_every_encoding_come_back_in_row_major_shape(path: Path, encoding: Encoding) -> None:
    first = random_tensor((3, 5, 256), encoding, np.random.default_rng(1))
    second = random_tensor((4, 512), encoding, np.random.default_rng(2))
    tensors = [RawTensor(name, t.shape, encoding, t.data) for name, t in (("first", first), ("second", second))]
    write_gguf(path, {}, tensors)
    checkpoint = open_gguf(path)
    assert checkpoint.path == path
    assert checkpoint.format is CheckpointFormat.GGUF
    assert checkpoint.generation_config == {}
    assert list(checkpoint.tensors) == ["first", "second"]
    for tensor in tensors:
        read = checkpoint.tensors[tensor.name]
        assert (read.name, read.shape, read.encoding) == (tensor.name, tensor.shape, encoding)
        np.testing.assert_array_equal(read.data, tensor.data)


def test_alignment_is_the_files_own(path: Path) -> None:
    tensors = [f32("a", 3), f32("b", 5)]
    write_gguf(path, {}, tensors, alignment=512)
    for tensor in tensors:
        np.testing.assert_array_equal(open_gguf(path).tensors[tensor.name].data, tensor.data)


def test_version_2_is_read(path: Path) -> None:
    path.write_bytes(raw_gguf([pair("k", STRING, text("v"))], [entry("t", [2])], struct.pack("<2f", 1, 2), version=2))
    checkpoint = open_gguf(path)
    assert checkpoint.metadata == {"k": "v"}
    np.testing.assert_array_equal(to_float32(checkpoint.tensors["t"]), [1, 2])


def test_tensors_stay_valid_after_the_checkpoint_and_the_file_are_gone(path: Path) -> None:
    write_gguf(path, {}, [f32("t", 4)])
    tensor = open_gguf(path).tensors["t"]
    path.unlink()
    np.testing.assert_array_equal(to_float32(tensor), [0, 1, 2, 3])


def test_tensor_data_cannot_be_written(path: Path) -> None:
    write_gguf(path, {}, [f32("t", 4)])
    data = open_gguf(path).tensors["t"].data
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_the_table_of_tensor_types_is_that_of_the_gguf_package() -> None:
    assert {int(kind): kind.name for kind in gguf.GGMLQuantizationType} == reader.TENSOR_TYPES
    for label, encoding in reader.ENCODINGS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[label]]
        assert (encoding.block_elements, encoding.block_bytes) == sizes


@pytest.mark.real_model
def test_the_real_model_is_whole(smollm2_path: Path) -> None:
    checkpoint = open_gguf(smollm2_path)
    assert len(checkpoint.tensors) == 272
    assert {tensor.encoding for tensor in checkpoint.tensors.values()} == {Encoding.F32, Encoding.Q4_1, Encoding.Q8_0}
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert checkpoint.tensors["blk.29.ffn_down.weight"].shape == (576, 1536)
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.metadata["llama.block_count"] == 30
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
    for tensor in checkpoint.tensors.values():
        values = to_float32(tensor)
        assert np.isfinite(values).all()
        assert 0.001 < np.abs(values).mean() < 20


@pytest.mark.real_model
@pytest.mark.slow
def test_the_real_model_is_read_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    checkpoint = open_gguf(smollm2_path)
    theirs = gguf.GGUFReader(smollm2_path)
    assert [tensor.name for tensor in theirs.tensors] == list(checkpoint.tensors)
    for tensor in theirs.tensors:
        ours = checkpoint.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert ours.encoding.label == tensor.tensor_type.name
        np.testing.assert_array_equal(ours.data, tensor.data.reshape(-1).view(np.uint8))
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        tensor = next(tensor for tensor in theirs.tensors if tensor.name == name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(to_float32(checkpoint.tensors[name]), expected)
    assert set(theirs.fields) - {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"} == set(checkpoint.metadata)
    for key, value in checkpoint.metadata.items():
        assert value == theirs.fields[key].contents()


# Split files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", {"k": "v"}, [f32(name, 4) for name in "abcde"], tensors_per_part=2)
    parts = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert all(part.exists() for part in parts)
    return parts


@pytest.mark.parametrize("index", range(3))
def test_a_split_file_opens_by_any_of_its_parts(parts: list[Path], index: int) -> None:
    checkpoint = open_gguf(parts[index])
    assert checkpoint.path == parts[0]
    assert checkpoint.metadata["k"] == "v"
    assert list(checkpoint.tensors) == list("abcde")
    for tensor in checkpoint.tensors.values():
        np.testing.assert_array_equal(to_float32(tensor), [0, 1, 2, 3])


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=re.escape(parts[1].name)):
        open_gguf(parts[0])


def test_parts_in_the_wrong_place_are_refused(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])
    with pytest.raises(CheckpointError, match=r"split\.no is 2, but by its name it is 1"):
        open_gguf(parts[0])


def test_a_part_without_the_name_of_a_part_is_refused(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"split\.count is 3.*NAME-00001-of-0000N"):
        open_gguf(other)


def test_a_whole_file_with_the_name_of_a_part_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write_gguf(tmp_path / f"m-0000{number}-of-00002.gguf", {}, [f32(f"t{number}", 4)])
    with pytest.raises(CheckpointError, match=r"split\.count is 1"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def u16(key: str, value: int) -> bytes:
    return pair(key, 2, struct.pack("<H", value))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        content = raw_gguf([u16("split.count", 2), u16("split.no", number)], [entry("t", [1])], b"\0" * 4)
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="tensor 't' is in an earlier part"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_parts_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        pairs = [u16("split.count", 2), u16("split.no", number), pair("split.tensors.count", 5, struct.pack("<i", 9))]
        content = raw_gguf(pairs, [entry(f"t{number}", [1])], b"\0" * 4)
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 9, but the parts have 2"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


# Files that are refused


def test_what_is_no_gguf_file_is_refused(path: Path) -> None:
    refused(path, b"", "0 bytes")
    refused(path, b"GGUF", "4 bytes")
    refused(path, b"PK\x03\x04" + b"\0" * 60, "not a GGUF file")


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: cannot be read: No such file"):
        open_gguf(path)


def test_versions_and_byte_orders_that_are_not_supported_are_named(path: Path) -> None:
    refused(path, raw_gguf(version=1), "version 1")
    refused(path, raw_gguf(version=4), "version 4")
    refused(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")


HUGE = 2**63


@pytest.mark.parametrize(
    "content",
    [
        raw_gguf(num_pairs=HUGE),
        raw_gguf(num_tensors=HUGE),
        raw_gguf([struct.pack("<Q", HUGE) + b"k" * 40]),
        raw_gguf([pair("k", STRING, struct.pack("<Q", HUGE) + b"v" * 40)]),
        raw_gguf([pair("k", ARRAY, array(U8, HUGE))]),
        raw_gguf([pair("k", ARRAY, array(U64, 2**61))]),
        raw_gguf([pair("k", ARRAY, array(STRING, HUGE))]),
        raw_gguf([pair("k", ARRAY, array(ARRAY, HUGE))]),
        raw_gguf([pair("k", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", HUGE) + b"b" * 20))]),
        raw_gguf(entries=[struct.pack("<Q", HUGE) + b"t" * 40]),
    ],
    ids=["pairs", "tensors", "key", "string", "array", "wide array", "strings", "arrays", "inner string", "name"],
)
def test_a_length_beyond_the_file_is_refused_with_the_numbers(path: Path, content: bytes) -> None:
    message = refused(path, content)
    assert re.search(r"\d{10,}", message)
    assert re.search(rf"\b{len(content)}\b", message)


def test_every_truncation_is_refused(path: Path) -> None:
    write_gguf(path, {"text": "value", "list": ["a", "b"], "numbers": [1, 2, 3]}, [f32("a", 3), f32("b", 2, 4)])
    content = path.read_bytes()
    data_end = len(content) - -(8 * 4) % 32
    for length in range(data_end):
        refused(path, content[:length])


def test_arrays_nested_too_deeply_are_refused(path: Path) -> None:
    value = array(U8, 1, b"\1")
    for _ in range(5):
        value = array(ARRAY, 1, value)
    refused(path, raw_gguf([pair("deep", ARRAY, value)]), "'deep'", "nested")


def test_bad_metadata_is_named(path: Path) -> None:
    refused(path, raw_gguf([pair("flag", BOOL, b"\2")]), "'flag'", "boolean")
    refused(path, raw_gguf([pair("odd", 13, b"\0" * 8)]), "'odd'", "type 13")
    refused(path, raw_gguf([pair("latin", STRING, text(b"\xff\xfe"))]), "'latin'", "UTF-8")
    refused(path, raw_gguf([pair(b"\xff\xfe", U8, b"\0")]), "pair 0", "UTF-8")
    refused(path, raw_gguf([pair("k", U8, b"\1"), pair("k", U8, b"\2")]), "'k'", "twice")
    refused(path, raw_gguf([pair("k" * 70_000, U8, b"\1")]), "pair 0", "65535")


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(path: Path, alignment: int) -> None:
    content = raw_gguf([pair("general.alignment", U32, struct.pack("<I", alignment))])
    refused(path, content, "general.alignment", str(alignment))
    refused(path, raw_gguf([pair("general.alignment", STRING, text("32"))]), "general.alignment", "'32'")


def test_bad_shapes_are_refused_with_the_tensors_name(path: Path) -> None:
    data = b"\0" * 64
    refused(path, raw_gguf(entries=[entry("t", [1, 1, 1, 1, 1])], data=data), "'t'", "5 dimensions")
    refused(path, raw_gguf(entries=[entry("t", [])], data=data), "'t'", "0 dimensions")
    refused(path, raw_gguf(entries=[entry("t", [4, 0])], data=data), "'t'", "[0, 4]")
    # 2**64 elements: zero in 64-bit arithmetic.
    refused(path, raw_gguf(entries=[entry("t", [2**32, 2**32])], data=data), "'t'", str(96 + 2**66), "truncated")
    refused(path, raw_gguf(entries=[entry("t", [2**62, 4])], data=data), "'t'", str(96 + 2**66), "truncated")
    refused(path, raw_gguf(entries=[entry("t", [33], kind=3)], data=data), "'t'", "33", "32", "Q4_1")
    refused(path, raw_gguf(entries=[entry("t", [128, 2], kind=12)], data=b"\0" * 144), "'t'", "128", "256", "Q4_K")


def test_an_unsupported_tensor_type_is_named_with_those_that_work(path: Path) -> None:
    message = refused(path, raw_gguf(entries=[entry("t", [256], kind=10)], data=b"\0" * 256), "'t'", "Q2_K")
    assert all(encoding.label in message for encoding in Encoding)
    refused(path, raw_gguf(entries=[entry("t", [256], kind=999)], data=b"\0" * 256), "'t'", "number 999")


def test_bad_places_are_refused_with_the_tensors_name(path: Path) -> None:
    data = b"\0" * 128
    refused(path, raw_gguf(entries=[entry("t", [4], offset=8)], data=data), "'t'", "8", "alignment 32")
    refused(path, raw_gguf(entries=[entry("t", [4], offset=128)], data=data), "'t'", "truncated")
    refused(path, raw_gguf(entries=[entry("t", [4], offset=2**64 - 32)], data=data), "'t'", "truncated")
    refused(path, raw_gguf(entries=[entry("t", [4]), entry("t", [4], offset=32)], data=data), "'t'", "twice")
    overlapping = [entry("a", [16]), entry("b", [4], offset=32)]
    refused(path, raw_gguf(entries=overlapping, data=data), "'b'", "overlaps", "'a'")


def test_the_order_of_the_data_is_free(path: Path) -> None:
    data = struct.pack("<8f", *range(8)) + struct.pack("<2f", 8, 9)
    path.write_bytes(raw_gguf(entries=[entry("a", [2], offset=32), entry("b", [8])], data=data))
    tensors = open_gguf(path).tensors
    np.testing.assert_array_equal(to_float32(tensors["a"]), [8, 9])
    np.testing.assert_array_equal(to_float32(tensors["b"]), range(8))


def test_a_header_beyond_the_limit_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 1000)
    refused(path, raw_gguf([pair("k", ARRAY, array(U8, 2000, b"\0" * 2000))]), "'k'", "1000")
    refused(path, raw_gguf([pair("k", ARRAY, array(STRING, 2, text("a" * 990) + text("b" * 990)))]), "'k'", "1000")
