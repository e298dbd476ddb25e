"""Random damage: a file either opens, and then every tensor can be decoded, or is refused. Nothing else happens."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.safetensors_folder import read_safetensors
from paceline.dequantize import to_float32
from paceline.errors import CheckpointError
from paceline.tensors import Encoding, RawTensor
from support.gguf_files import write_gguf
from support.raw_tensors import random_tensor

ROUNDS = 1500
MAX_MEMORY = 8 << 20

# What damage puts in a number's place: the values at the edges of the types that lengths and offsets have.
EDGES = [
    value.to_bytes(width, "little")
    for width in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1)
]


def gguf_content(folder: Path) -> bytes:
    rng = np.random.default_rng(1)
    tensors = [
        RawTensor(name, (2, 256), encoding, random_tensor((2, 256), encoding, rng).data)
        for name, encoding in (("a", Encoding.F32), ("b", Encoding.Q4_1), ("c", Encoding.Q6_K))
    ]
    metadata = {"words": ["one", "two", "three"], "numbers": [1, 2, 3], "nested": [[1], [2, 3]], "text": "words " * 5}
    write_gguf(folder / "good.gguf", metadata, tensors)
    return (folder / "good.gguf").read_bytes()


def safetensors_content(folder: Path) -> bytes:
    tensors = {"a": np.zeros((3, 4), np.float32), "b": np.ones(7, np.float16), "c": np.array(1, np.float32)}
    save_file(tensors, folder / "good.safetensors", metadata={"format": "np"})
    return (folder / "good.safetensors").read_bytes()


def damage(content: bytes, random_: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(random_.choice([1, 1, 1, 2, 4])):
        # The header is a small part of the file and the one that matters.
        place = random_.randrange(min(len(damaged), random_.choice([64, 1024, len(content)])))
        match random_.choice([0, 0, 0, 1, 1, 2, 2, 3, 4]):
            case 0:
                damaged[place] ^= 1 << random_.randrange(8)
            case 1:
                damaged[place] = random_.randrange(256)
            case 2:
                edge = random_.choice(EDGES)
                damaged[place : place + len(edge)] = edge
            case 3:
                del damaged[place + 1 : place + random_.randrange(2, 20)]
            case 4:
                del damaged[place + 1 :]
    return bytes(damaged)


@pytest.mark.parametrize(
    ("make", "read"),
    [(gguf_content, lambda path: open_gguf(path).tensors), (safetensors_content, read_safetensors)],
    ids=["gguf", "safetensors"],
)
def test_a_damaged_file_opens_or_is_refused_within_little_memory(
    tmp_path: Path, make: Callable[[Path], bytes], read: Callable[[Path], dict[str, RawTensor]]
) -> None:
    content = make(tmp_path)
    random_ = random.Random(2)
    opened = 0
    messages: list[str] = []
    tracemalloc.start()
    try:
        for round_ in range(ROUNDS):
            path = tmp_path / f"{round_}.gguf"
            path.write_bytes(damage(content, random_))
            try:
                tensors = read(path)
            except CheckpointError as error:
                messages.append(str(error))
            else:
                for tensor in tensors.values():
                    assert to_float32(tensor).shape == tensor.shape
                opened += 1
            path.unlink()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_MEMORY
    assert all(message.startswith(str(tmp_path)) and len(message) < 800 for message in messages)
    # Both outcomes must have been seen for the test to mean something.
    assert min(opened, len(messages)) > ROUNDS // 50
