"""GGUF files, versions 2 and 3, little endian.

The format is specified in ``docs/gguf.md`` of github.com/ggml-org/ggml: a header with the metadata and the tensors'
names, shapes, types and offsets, then the tensors' data. Files come from strangers, so no number in them is believed:
each is compared with what the file really holds before anything is read or allocated on its word.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.checkpoint.file_map import map_file
from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError
from paceline.tensors import Encoding, RawTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIXED_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata pairs
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 65535
MAX_NESTING = 4
# Real headers reach some ten megabytes (a vocabulary and its merges). Lists in memory are several times larger than
# in the file, so a damaged file could otherwise ask for more memory than the machine has.
MAX_HEADER_BYTES = 64 << 20

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
ENCODINGS = {encoding.label: encoding for encoding in Encoding}

PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one by any of its parts. No tensor data is read.

    Raises CheckpointError for a file that is missing, damaged or not supported.
    """
    paths = part_paths(path)
    missing = [part.name for part in paths if not part.is_file()]
    if missing and path.is_file():
        raise CheckpointError(f"{path}: is split into {len(paths)} parts, of which are missing: {', '.join(missing)}")
    parts = [_read_part(part) for part in paths]

    tensors: dict[str, RawTensor] = {}
    for number, part in enumerate(parts):
        _check_split(part, number, len(parts))
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: tensor {name!r:.100} is in an earlier part, too")
            tensors[name] = tensor
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count is {total!r:.100}, but the parts have {len(tensors)} tensors"
        )
    return Checkpoint(paths[0], CheckpointFormat.GGUF, parts[0].metadata, tensors)


def part_paths(path: Path) -> list[Path]:
    """All parts of the split file to which ``path`` belongs by its name, in order; else ``path`` alone."""
    match = PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count = match["count"]
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]


def _check_split(part: _Part, number: int, count: int) -> None:
    """A part's own idea of its place must be that of its name."""
    said_count = part.metadata.get("split.count", 1)
    if said_count != count:
        raise CheckpointError(
            f"{part.path}: split.count is {said_count!r:.100}, but by its name it is one of {count}; "
            "parts are named NAME-00001-of-0000N.gguf"
        )
    said_number = part.metadata.get("split.no", 0)
    if said_number != number:
        raise CheckpointError(f"{part.path}: split.no is {said_number!r:.100}, but by its name it is {number}")


def _read_part(path: Path) -> _Part:
    data = map_file(path, FIXED_HEADER.size)
    magic, version, num_tensors, num_pairs = FIXED_HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CheckpointError(f"{path}: is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{path}: is a big-endian GGUF file; only little-endian ones are supported")
        raise CheckpointError(f"{path}: is GGUF version {version}; versions 2 and 3 are supported")
    cursor = _Cursor(path, data)
    metadata = _read_metadata(cursor, num_pairs)
    return _Part(path, metadata, _read_tensors(cursor, num_tensors, metadata))


class _Cursor:
    """Reads forward through the header. ``item`` names what is being read, for the errors."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.pos = FIXED_HEADER.size
        self.end = min(len(data), MAX_HEADER_BYTES)

    def error(self, item: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {item} {problem}")

    def check(self, item: str, count: int, size: int) -> None:
        """Raise unless ``count`` entries of at least ``size`` bytes each can follow."""
        if count * size > self.end - self.pos:
            whose = "file" if self.end == len(self.data) else "largest header that is supported"
            raise self.error(
                item, f"needs {count * size} bytes at offset {self.pos}, but the {whose} ends at {self.end}"
            )

    def integer(self, item: str, form: struct.Struct) -> int:
        self.check(item, 1, form.size)
        value: int = form.unpack_from(self.data, self.pos)[0]
        self.pos += form.size
        return value

    def numbers(self, item: str, code: int, count: int) -> list[Any]:
        dtype = np.dtype(NUMBERS[code])
        self.check(item, count, dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.pos)
        self.pos += count * dtype.itemsize
        if code == BOOL:
            if count and values.max() > 1:
                raise self.error(item, f"holds {values.max()} where a boolean, 0 or 1, belongs")
            values = values.astype(bool)
        entries: list[Any] = values.tolist()
        return entries

    def strings(self, item: str, count: int) -> list[str]:
        self.check(item, count, U64.size)
        # A vocabulary has some hundred thousand strings: this loop is most of the time that opening takes.
        data, pos, end, unpack = self.data, self.pos, self.end, U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                if (start := pos + 8) > end or (stop := start + unpack(data, pos)[0]) > end:
                    self.pos = pos
                    length = self.integer(item, U64)
                    raise self.error(item, f"has a string of {length} bytes at offset {start}, beyond the end at {end}")
                strings.append(data[start:stop].decode())
                pos = stop
        except UnicodeDecodeError as error:
            raise self.error(item, f"has a string at offset {start} that is not UTF-8: {error.reason}") from error
        self.pos = pos
        return strings

    def name(self, item: str) -> str:
        (name,) = self.strings(item, 1)
        if len(name.encode()) > MAX_NAME_BYTES:
            raise self.error(item, f"has more than {MAX_NAME_BYTES} bytes")
        return name

    def values(self, item: str, code: int, count: int, depth: int = 0) -> list[Any]:
        """``count`` metadata values of one type."""
        if code in NUMBERS:
            return self.numbers(item, code, count)
        if code == STRING:
            return self.strings(item, count)
        if code != ARRAY:
            raise self.error(item, f"has the unknown value type {code}")
        if depth == MAX_NESTING:
            raise self.error(item, f"has arrays nested more than {MAX_NESTING} deep")
        self.check(item, count, U32.size + U64.size)
        return [self.values(item, self.integer(item, U32), self.integer(item, U64), depth + 1) for _ in range(count)]


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    cursor.check(f"the metadata of {count} pairs", count, U64.size + U32.size + 1)
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.name(f"the key of metadata pair {index}")
        item = f"metadata {key!r:.100}"
        if key in metadata:
            raise cursor.error(item, "occurs twice")
        (metadata[key],) = cursor.values(item, cursor.integer(item, U32), 1)
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, RawTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error("general.alignment", f"must be a power of two, not {alignment!r:.100}")
    cursor.check(f"the list of {count} tensors", count, 2 * U64.size + 2 * U32.size)
    entries: dict[str, tuple[tuple[int, ...], Encoding, int]] = {}
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        if name in entries:
            raise cursor.error(f"tensor {name!r:.100}", "occurs twice")
        entries[name] = _read_entry(cursor, f"tensor {name!r:.100}", alignment)

    data_start = -(-cursor.pos // alignment) * alignment
    data = np.frombuffer(cursor.data, np.uint8)
    tensors = {
        name: RawTensor(name, shape, encoding, _slice_data(cursor, data, name, shape, encoding, data_start + offset))
        for name, (shape, encoding, offset) in entries.items()
    }
    _check_overlap(cursor, tensors, {name: offset for name, (_, _, offset) in entries.items()})
    return tensors


def _read_entry(cursor: _Cursor, item: str, alignment: int) -> tuple[tuple[int, ...], Encoding, int]:
    """Shape, encoding and offset of one tensor. The file lists the contiguous dimension first; we put it last."""
    num_dims = cursor.integer(item, U32)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(item, f"has {num_dims} dimensions; 1 to {MAX_DIMS} are supported")
    shape = tuple(cursor.integer(item, U64) for _ in range(num_dims))[::-1]
    code = cursor.integer(item, U32)
    offset = cursor.integer(item, U64)
    if min(shape) < 1:
        raise cursor.error(item, f"has the shape {list(shape)}; every dimension must be at least 1")
    label = TENSOR_TYPES.get(code, f"number {code}")
    encoding = ENCODINGS.get(label)
    if encoding is None:
        raise cursor.error(
            item, f"has the type {label}, which is not supported; those that are: {', '.join(ENCODINGS)}"
        )
    if shape[-1] % encoding.block_elements:
        raise cursor.error(
            item,
            f"has rows of {shape[-1]} elements, not a multiple of the {encoding.block_elements} of a {label} block",
        )
    if offset % alignment:
        raise cursor.error(item, f"has the offset {offset}, not a multiple of the alignment {alignment}")
    return shape, encoding, offset


def _slice_data(
    cursor: _Cursor, data: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], encoding: Encoding, start: int
) -> npt.NDArray[np.uint8]:
    num_bytes = math.prod(shape) // encoding.block_elements * encoding.block_bytes
    if start + num_bytes > len(data):
        raise cursor.error(
            f"tensor {name!r:.100}",
            f"of shape {list(shape)} takes bytes {start} to {start + num_bytes}, but the file has {len(data)}: "
            "it is truncated or damaged",
        )
    return data[start : start + num_bytes]


def _check_overlap(cursor: _Cursor, tensors: dict[str, RawTensor], offsets: dict[str, int]) -> None:
    end, before = 0, ""
    for name in sorted(offsets, key=offsets.__getitem__):
        if offsets[name] < end:
            raise cursor.error(f"tensor {name!r:.100}", f"overlaps tensor {before!r:.100}")
        end, before = offsets[name] + len(tensors[name].data), name
