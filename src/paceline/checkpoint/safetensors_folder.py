"""Folders as Hugging Face's libraries write them: ``config.json`` beside one or more safetensors files.

The file format (github.com/huggingface/safetensors): eight bytes with the length N of the header, N bytes of JSON that
give each tensor's type, shape and place, then the data. The header is read here rather than by the ``safetensors``
library because that has no uncopied view of a file for numpy, and none at all of bfloat16, which numpy does not know.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from paceline.checkpoint.file_map import map_file
from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError
from paceline.tensors import Encoding, RawTensor

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMS = 8
ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}


def open_safetensors_folder(folder: Path) -> Checkpoint:
    """Open a folder with ``config.json`` and ``model.safetensors`` or, for several files, their index.

    No tensor data is read. Raises CheckpointError, naming file and item.
    """
    config = read_json_file(folder / CONFIG_FILE)
    generation = folder / GENERATION_CONFIG_FILE
    generation_config = read_json_file(generation) if generation.exists() else {}
    if (folder / SINGLE_FILE).exists():
        tensors = read_safetensors(folder / SINGLE_FILE)
    else:
        tensors = _read_shards(folder)
    return Checkpoint(folder, CheckpointFormat.SAFETENSORS, config, tensors, generation_config)


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file, as views of its memory map."""
    memory = map_file(path, LENGTH_BYTES)
    data_start, header = _read_header(path, memory)
    data = np.frombuffer(memory, np.uint8, offset=data_start)
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, encoding, begin, end = _check_entry(f"{path}: tensor {name!r:.100}", entry, len(data))
        tensors[name] = RawTensor(name, shape, encoding, data[begin:end])
        spans.append((begin, end, name))
    _check_spans(path, spans, len(data))
    return tensors


def _read_header(path: Path, memory: mmap.mmap) -> tuple[int, Mapping[str, Any]]:
    """The offset of the data, and the header."""
    length = int.from_bytes(memory[:LENGTH_BYTES], "little")
    limit = min(len(memory) - LENGTH_BYTES, MAX_HEADER_BYTES)
    if length > limit:
        raise CheckpointError(
            f"{path}: is not a safetensors file or is damaged: its header would have {length} bytes, "
            f"but at most {limit} are possible"
        )
    end = LENGTH_BYTES + length
    return end, _parse_json(f"{path}: the header", memory[LENGTH_BYTES:end])


def _check_entry(item: str, entry: Any, data_bytes: int) -> tuple[tuple[int, ...], Encoding, int, int]:
    """Shape, encoding, first and last byte of a tensor, from its entry in the header."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{item}: the header's entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{item}: the shape must be a list of at most {MAX_DIMS} sizes, not {shape!r:.100}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{item}: data_offsets must be two byte offsets, not {offsets!r:.100}")
    encoding = ENCODINGS.get(dtype) if isinstance(dtype, str) else None
    if encoding is None:
        raise CheckpointError(
            f"{item}: has the type {dtype!r:.100}, which is not supported; those that are: {', '.join(ENCODINGS)}"
        )
    begin, end = offsets
    num_bytes = math.prod(shape) * encoding.block_bytes
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{item}: has the shape {shape}, {num_bytes} bytes of {dtype}, but {end - begin} bytes in the file"
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{item}: ends at byte {end} of the data, but there are {data_bytes}: the file is truncated or damaged"
        )
    return tuple(shape), encoding, begin, end


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The format wants the tensors to fill the data, without overlap and without holes."""
    position, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin < position:
            raise CheckpointError(f"{path}: tensor {name!r:.100} overlaps {before}")
        if begin > position:
            raise CheckpointError(
                f"{path}: {begin - position} bytes between {before} and tensor {name!r:.100} are unused"
            )
        position, before = end, f"tensor {name!r:.100}"
    if position != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - position} bytes after {before} are unused")


def _read_shards(folder: Path) -> dict[str, RawTensor]:
    """The tensors of all files that the index names, which must be exactly those that the index lists."""
    index_path = folder / INDEX_FILE
    weight_map = read_json_file(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map must be an object of tensor and file names")
    for name, shard in weight_map.items():
        # A name with a folder in it could point anywhere on this machine.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_path}: tensor {name!r:.100} is in {shard!r:.100}, not a safetensors file here"
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index_path}: of its {len(shards)} files are missing: {', '.join(missing)}")

    tensors: dict[str, RawTensor] = {}
    homes: dict[str, str] = {}
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard).items():
            if name in tensors:
                raise CheckpointError(f"{folder / shard}: tensor {name!r:.100} is in {homes[name]}, too")
            tensors[name], homes[name] = tensor, shard
    for name, shard in weight_map.items():
        if homes.get(name) != shard:
            raise CheckpointError(f"{index_path}: tensor {name!r:.100} should be in {shard}, but is not")
    return tensors


def read_json_file(path: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError, naming the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _parse_json(str(path), text)


def _parse_json(item: str, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{item}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{item}: must be a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r:.100} occurs twice")
        result[name] = value
    return result
