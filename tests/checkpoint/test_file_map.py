from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.checkpoint.file_map import drop_pages, map_file
from paceline.runner.memory import resident_memory

MIB = 2**20


def test_dropped_pages_leave_the_memory_and_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    content = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
    path.write_bytes(content.tobytes())
    data = np.frombuffer(map_file(path, 1), np.uint8)
    before = resident_memory()
    part = data[MIB + 5 : 61 * MIB + 7]
    total = int(part.sum(dtype=np.int64))
    assert resident_memory() - before > 50 * MIB
    drop_pages(part)
    assert resident_memory() - before < 10 * MIB
    assert int(part.sum(dtype=np.int64)) == total
    drop_pages(data)
    assert np.array_equal(data, content)


def test_an_array_that_is_no_view_of_a_file_stays_as_it_is() -> None:
    data = np.arange(10_000, dtype=np.uint8)
    drop_pages(data[5_000:])
    assert np.array_equal(data, np.arange(10_000, dtype=np.uint8))
