"""A file as read-only bytes, without reading it."""

from __future__ import annotations

import mmap
from pathlib import Path

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
