"""Where the time of a decode step goes: native operations, and the Python around them.

    python benchmarks/step_overhead.py [MODEL] [--threads 2] [--batches 1 8 32] [--temperature 0.8]

Generates with `LLM` and measures each step from its beginning to the next one's: the median step, in microseconds. The
parts are medians, too, so that they need not add up. Python is all that is not inside a native operation, and stands
in per cent of the step. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from paceline import LLM, SamplingParams
from paceline.config import DEFAULT_MODEL
from paceline.core.scheduler import Scheduler
from paceline.engine.engine import Engine
from paceline.engine.text_side import TextSide
from paceline.ops.cpu import CpuOps
from paceline.ops.program import CapturedForward
from paceline.runner.runner import ModelRunner

NATIVE: dict[str, list[tuple[type, str]]] = {
    "forward": [(CapturedForward, "__call__")],
    "head": [(CpuOps, "take_rows"), (CpuOps, "linear")],
    "choice": [(CpuOps, "edit_logits"), (CpuOps, "choose"), (CpuOps, "top_logprobs")],
}
AROUND: dict[str, list[tuple[type, str]]] = {
    "plan": [(Scheduler, "plan")],
    "execute": [(ModelRunner, "execute")],
    "commit": [(Scheduler, "commit")],
    "text": [(TextSide, "update")],
}
WARM_UP = 20


class Stopwatch:
    """Microseconds by name for each step, from the beginning of one ``Engine.step`` to that of the next."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = defaultdict(float)
        self._begin = 0.0
        for name, methods in (NATIVE | AROUND).items():
            for owner, method in methods:
                self._watch(name, owner, method)
        step = Engine.step

        def watched(engine: Engine) -> Any:
            self._turn()
            return step(engine)

        Engine.step = watched  # type: ignore[assignment, method-assign]

    def _turn(self) -> None:
        now = time.perf_counter()
        self._current["step"] = 1e6 * (now - self._begin)
        self.steps.append(self._current)
        self._current, self._begin = defaultdict(float), now

    def _watch(self, name: str, owner: type, method: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._current[name] += 1e6 * (time.perf_counter() - begin)

        setattr(owner, method, watched)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the Python around a decode step.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    watch = Stopwatch()
    columns = ["step", *NATIVE, "Python", "plan", "execute", "commit", "text", "rest"]
    with LLM(args.model, num_threads=args.threads, max_model_len=1024) as llm:
        print(f"{llm.numerics}, {args.threads} threads; microseconds; execute without its native operations")
        print("batch " + "".join(f"{column:>9}" for column in columns) + "       %")
        for batch in args.batches:
            watch.steps.clear()
            params = SamplingParams(temperature=args.temperature, max_tokens=args.steps, ignore_eos=True, seed=1)
            llm.generate([[batch + i, *range(100, 131)] for i in range(batch)], params, use_tqdm=False)
            report(batch, [parts(step) for step in watch.steps[WARM_UP:-2]], columns)


def parts(step: dict[str, float]) -> dict[str, float]:
    native = sum(step[name] for name in NATIVE)
    around = sum(step[name] for name in AROUND)
    return step | {"Python": step["step"] - native, "execute": step["execute"] - native, "rest": step["step"] - around}


def report(batch: int, steps: list[dict[str, float]], columns: list[str]) -> None:
    medians = {column: statistics.median(step[column] for step in steps) for column in columns}
    row = "".join(f"{medians[column]:9.0f}" for column in columns)
    print(f"{batch:5} {row} {100 * medians['Python'] / medians['step']:7.1f}", flush=True)


if __name__ == "__main__":
    main()
