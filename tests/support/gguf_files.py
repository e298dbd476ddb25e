"""GGUF files for tests: good ones through the ``gguf`` package, hostile ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from paceline.tensors import RawTensor

U8, BOOL, STRING, ARRAY, U32, U64 = 0, 7, 8, 9, 4, 10
F32_TENSOR = 0


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: Sequence[RawTensor],
    *,
    tensors_per_part: int = 0,
    alignment: int = 32,
) -> None:
    """A well-formed file, or with ``tensors_per_part`` the parts of a split one, named as ``path`` plus numbers."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_part)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for tensor in tensors:
        rows = tensor.data.reshape(*tensor.shape[:-1], tensor.row_bytes)
        writer.add_tensor(tensor.name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.encoding.label])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        type_name, number = value
        getattr(writer, f"add_{type_name}")(key, number)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def entry(name: str, dims: Sequence[int], kind: int = F32_TENSOR, offset: int = 0) -> bytes:
    """A tensor's entry in the header. ``dims`` are in the file's order, the contiguous one first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    counts = (
        len(entries) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    header = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(pairs) + b"".join(entries)
    padding = b"\0" * (-len(header) % 32) if data else b""
    return header + padding + data
