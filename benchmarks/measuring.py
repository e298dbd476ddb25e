"""What the benchmarks share: naming the machine, repeating, and tables."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.ops.threads import usable_cores


@dataclass(frozen=True)
class Spread:
    """The median of some values, and the smallest and the largest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, form: str = ".1f") -> str:
        return f"{self.median:{form}} ({self.low:{form}} .. {self.high:{form}})"


def best_seconds(run: Callable[[], object], *, runs: int = 5, at_least: float = 0.05) -> float:
    """Seconds of the fastest ``run``, of ``runs`` and of ``at_least`` so many seconds' worth. One more warms up."""
    run()
    best = float("inf")
    begin = time.perf_counter()
    while runs > 0 or time.perf_counter() - begin < at_least:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        runs -= 1
    return best


def machine() -> str:
    """The kind of machine this is: the processor's name, its family and model, the cores, and the memory."""
    facts: dict[str, str] = {}
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name", platform.processor() or platform.machine())
    kind = f" (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else ""
    memory = next((int(line.split()[1]) for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal:")), 0)
    return f"{name}{kind}, {usable_cores()[0]} cores, {memory / 2**20:.0f} GiB of memory"


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    print(line(titles))
    print(f"|{'|'.join('-' * (width + 2) if i == 0 else '-' * (width + 1) + ':' for i, width in enumerate(widths))}|")
    for row in rows:
        print(line(row))
    print(flush=True)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
