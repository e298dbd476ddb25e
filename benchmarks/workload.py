"""The common workload: what an engine does in a second on SmolLM2-135M-Instruct, by kind of load.

    python benchmarks/workload.py --threads 2 --tests pp512 d1 d8 d32 --repeats 3

Greedy, end of sequence ignored, all requests of a test submitted at once. ``workload.json`` holds the token ids, so
that every engine can be given the same work:

* pp512, pp2048: one prompt, one new token; prompt tokens per second.
* d1, d8, d32: that many prompts of 128 tokens, 128 new tokens each; new tokens per second without the prefill, from the
  difference to a run with one new token.
* cb: 64 requests with prompts of 32 to 512 and outputs of 16 to 256 tokens; output tokens per second.
* sp: 32 requests that share a prefix of 1,024 tokens, 32 own tokens and 32 new ones each; output tokens per second.

Each repetition rotates every prompt by another amount, so that no earlier one can answer it from a cache. Run nothing
beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.config import DEFAULT_MODEL
from paceline.runner.memory import gib, resident_memory

WORKLOAD = Path(__file__).with_name("workload.json")
TESTS = ("pp512", "pp2048", "d1", "d8", "d32", "cb", "sp")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an engine on the common workload.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    workload = json.loads(WORKLOAD.read_text())
    with LLM(args.model, ops=args.ops, num_threads=args.threads, kv_cache_memory=2 * 2**30, max_model_len=4096) as llm:
        print(f"{llm.numerics}, {args.threads} threads, {args.repeats} repeats: median (smallest .. largest) tokens/s")
        for test in args.tests:
            speeds = [measure(llm, workload, test, repeat) for repeat in range(args.repeats)]
            print(f"{test:7} {statistics.median(speeds):9.1f}  ({min(speeds):.1f} .. {max(speeds):.1f})", flush=True)
    print(f"memory at the end: {gib(resident_memory())}")


def measure(llm: LLM, workload: dict[str, Any], test: str, repeat: int) -> float:
    """Tokens per second of one run."""
    turn = 7 * repeat + 1
    if test.startswith("pp"):
        prompt = rotated(workload["prefill" + test[2:]], turn)
        return len(prompt) / seconds(llm, [prompt], [1])
    if test.startswith("d"):
        count = int(test[1:])
        prompts = [rotated(prompt, turn) for prompt in workload["batch"][:count]]
        short = seconds(llm, prompts, [1] * count)
        # The long run must not find the short one's prompts in the prefix cache.
        llm.reset_prefix_cache()
        return 127 * count / (seconds(llm, prompts, [128] * count) - short)
    if test == "cb":
        lengths = [request["out"] for request in workload["cb"]]
        return sum(lengths) / seconds(llm, [rotated(request["prompt"], turn) for request in workload["cb"]], lengths)
    prefix = rotated(workload["prefix"], turn)
    prompts = [prefix + rotated(suffix, turn) for suffix in workload["suffixes"]]
    return 32 * len(prompts) / seconds(llm, prompts, [32] * len(prompts))


def seconds(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=length) for length in lengths]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return took


def rotated(prompt: list[int], turn: int) -> list[int]:
    turn %= len(prompt)
    return prompt[turn:] + prompt[:turn]


if __name__ == "__main__":
    main()
