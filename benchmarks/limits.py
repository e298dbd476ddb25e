"""The machine's limits, measured: how fast it reads memory and multiplies.

    python benchmarks/limits.py

Compiles ``limits.cpp`` with the system's compiler (``$CXX`` or ``c++``) for this very processor and runs it on one
thread and on all cores. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import machine, print_table
from paceline.ops.threads import usable_cores

SOURCE = Path(__file__).with_name("limits.cpp")


@dataclass(frozen=True)
class Limits:
    """What so many threads reach together. Arithmetic is in multiply-adds a second.

    Attributes:
        read: bytes a second of reading a buffer from end to end again and again, by its size in bytes.
        fma: float32.
        int8: products of bytes; None where the processor has no instruction for them that we know.
        bf16: products of bfloat16 pairs with float32 sums; None likewise.
        int8_tiles, bf16_tiles: the same in the processor's tiles (AMX).
    """

    threads: int
    read: dict[int, float]
    fma: float
    int8: float | None
    bf16: float | None
    int8_tiles: float | None
    bf16_tiles: float | None

    def bandwidth(self, size: float) -> float:
        """Bytes a second for data of this size, from the measured size that is nearest."""
        return self.read[min(self.read, key=lambda measured: abs(math.log(measured / max(size, 1))))]


def main() -> None:
    argparse.ArgumentParser(description="Measure how fast this machine reads and multiplies.").parse_args()
    cores = usable_cores()[0]
    print(machine(), "\n")
    print_limits(measure_limits(sorted({1, cores})))


def print_limits(limits: Sequence[Limits]) -> None:
    rows = [
        [f"read {size >> 20} MiB, GB/s", *(f"{one.read[size] / 1e9:.1f}" for one in limits)] for size in limits[0].read
    ]
    for name, title in (
        ("fma", "float32 multiply-add"),
        ("bf16", "bfloat16 dot"),
        ("int8", "8-bit dot"),
        ("bf16_tiles", "bfloat16 tiles"),
        ("int8_tiles", "8-bit tiles"),
    ):
        speeds = [getattr(one, name) for one in limits]
        rows.append([f"{title}, 10⁹/s", *("none" if speed is None else f"{speed / 1e9:.0f}" for speed in speeds)])
    print_table(["", *(f"{one.threads} thread{'s' * (one.threads > 1)}" for one in limits)], rows)


def measure_limits(threads: Sequence[int]) -> list[Limits]:
    """The limits for each number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native", "-pthread"]
        subprocess.run([*command, "-o", str(program), str(SOURCE)], check=True)
        return [_run(program, count) for count in threads]


def _run(program: Path, threads: int) -> Limits:
    done = subprocess.run([str(program), str(threads)], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    read = {int(size): speed for size, speed in found["read"].items()}
    others = {name: found.get(name) for name in ("int8", "bf16", "int8_tiles", "bf16_tiles")}
    return Limits(threads, read, found["fma"], **others)


if __name__ == "__main__":
    main()
