"""A file as read-only bytes, without reading it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError


def map_file(path: Path, minimum: int) -> mmap.mmap:
    """The whole file, memory mapped. Raises CheckpointError if it cannot be read or has fewer than ``minimum`` bytes.

    An array made from the map keeps it open; the pages are read when they are first touched.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size >= minimum:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise CheckpointError(f"{path}: has {size} bytes, fewer than the {minimum} at the front of every such file")


def drop_pages(data: npt.NDArray[np.uint8]) -> None:
    """Take a view of a mapped file out of this process's memory; what is read again comes back from the file.

    So a file that is read once from end to end does not stand beside what was made of it. An array that is no such view
    stays as it is, and so does everything where the system has no way to do this.
    """
    owner: Any = data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):  # what an array made from a buffer holds
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first, start + len(data) - first)
