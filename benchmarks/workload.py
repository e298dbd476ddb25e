"""The common workload: what an engine does in a second on SmolLM2-135M-Instruct, by kind of load.

    python benchmarks/workload.py --tests pp512 d1 d8 d32 --repeats 3

Greedy, end of sequence ignored, all requests of a test submitted at once. ``workload.json`` holds the token ids, so
that every engine can be given the same work:

* pp512, pp2048: one prompt, one new token; prompt tokens per second.
* d1, d8, d32: that many prompts of 128 tokens, 128 new tokens each; new tokens per second without the prefill, from the
  difference to a run with one new token.
* cb: 64 requests with prompts of 32 to 512 and outputs of 16 to 256 tokens; output tokens per second, and the mean time
  to the first token.
* sp: 32 requests that share a prefix of 1,024 tokens, 32 own tokens and 32 new ones each; output tokens per second.

Each repetition rotates every prompt by another amount, so that no earlier one can answer it from a cache. Run nothing
beside it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from engines import Contestant, Paceline
from measuring import Spread, machine, print_table
from paceline.config import DEFAULT_MODEL
from paceline.runner.memory import gib, resident_memory

WORKLOAD = json.loads(Path(__file__).with_name("workload.json").read_text())
TESTS = ("pp512", "pp2048", "d1", "d8", "d32", "cb", "sp")


@dataclass(frozen=True)
class Figure:
    """Tokens per second, of the kind that the test counts; mean seconds to a first token."""

    speed: float
    first_token: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine on the common workload.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = Paceline(
        args.model, ops=args.ops, quantization=args.quantization, num_threads=args.threads, kv_cache_memory=2 * 2**30
    )
    print(f"{machine()}\n{args.model}, {engine.numerics}, {args.repeats} repeats: median (smallest .. largest)\n")
    rows = []
    for test in args.tests:
        figures = [measure(engine, test, repeat) for repeat in range(args.repeats)]
        speed = Spread.of([figure.speed for figure in figures])
        rows.append([test, speed.text(), f"{Spread.of([figure.first_token for figure in figures]).median:.3f}"])
    print_table(["test", "tokens/s", "first token, s"], rows)
    print(f"memory at the end: {gib(resident_memory())}")


def requests(test: str, repeat: int) -> tuple[list[list[int]], list[int]]:
    """The prompts of a test, and how many tokens each is to get."""
    turn = 7 * repeat + 1
    if test.startswith("pp"):
        return [rotated(WORKLOAD["prefill" + test[2:]], turn)], [1]
    if test.startswith("d"):
        prompts = [rotated(prompt, turn) for prompt in WORKLOAD["batch"][: int(test[1:])]]
        return prompts, [128] * len(prompts)
    if test == "cb":
        return [rotated(each["prompt"], turn) for each in WORKLOAD["cb"]], [each["out"] for each in WORKLOAD["cb"]]
    prefix = rotated(WORKLOAD["prefix"], turn)
    prompts = [prefix + rotated(suffix, turn) for suffix in WORKLOAD["suffixes"]]
    return prompts, [32] * len(prompts)


def measure(engine: Contestant, test: str, repeat: int) -> Figure:
    """One run of a test."""
    prompts, lengths = requests(test, repeat)
    if test.startswith("pp"):
        run = engine.run(prompts, lengths)
        return Figure(len(prompts[0]) / run.seconds, run.first_token)
    if test.startswith("d"):
        return measure_decode(engine, prompts, lengths[0])
    run = engine.run(prompts, lengths, shared=test == "sp")
    return Figure(sum(lengths) / run.seconds, run.first_token)


def measure_decode(engine: Contestant, prompts: list[list[int]], length: int) -> Figure:
    """The speed of the tokens after the first, for so many tokens of each prompt."""
    short = engine.run(prompts, [1] * len(prompts))
    long = engine.run(prompts, [length] * len(prompts))
    return Figure(len(prompts) * (length - 1) / (long.seconds - short.seconds), short.first_token)


def rotated(prompt: list[int], turn: int) -> list[int]:
    turn %= len(prompt)
    return prompt[turn:] + prompt[:turn]


if __name__ == "__main__":
    main()
