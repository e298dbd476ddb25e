"""From the start of the process to the first token, and the memory that takes.

    python benchmarks/startup.py [MODEL] [--quantization int8] [--repeats 5]

Runs ``paceline run MODEL`` as a user would and times its first output. The parts are the ones that the engine's own log
tells; the imports are what ``python -X importtime`` finds, by package. The file should be in the page cache: the first
run, which is not counted, puts it there. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter

from paceline.config import DEFAULT_MODEL
from paceline.runner.memory import gib

PROMPT = "What is the capital of France?"
PARTS = re.compile(r"opened in (\S+) s, packed in (\S+) s, sized in (\S+) s")
SIZES = """
import dataclasses, json, sys
from paceline.config import EngineConfig
from paceline.engine.load import load_engine
from paceline.ops.api import Linear

def packed(value):
    if dataclasses.is_dataclass(value):
        return sum(packed(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, (list, tuple)):
        return sum(map(packed, value))
    return value.nbytes if hasattr(value, "num_outputs") else 0

loaded = load_engine(EngineConfig(sys.argv[1], quantization=sys.argv[2] or None))
runner = loaded.engine._runner
print(json.dumps([packed(runner._model), runner._kv.nbytes]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long the first token of a new process takes.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    runs = [run_once(args.model, args.quantization) for _ in range(args.repeats + 1)][1:]
    print(f"{args.model}, median of {args.repeats} (smallest .. largest), seconds")
    for name in runs[0]:
        if name != "peak":
            times = [run[name] for run in runs]
            print(f"  {name:34} {statistics.median(times):6.3f}  ({min(times):.3f} .. {max(times):.3f})")
    print("imports by package, milliseconds (importtime itself adds some):")
    for package, microseconds in import_times().most_common(8):
        print(f"  {package:34} {microseconds / 1000:6.1f}")
    weights, kv = sizes(args.model, args.quantization)
    peak = int(statistics.median(run["peak"] for run in runs))
    print(f"memory: packed weights {gib(weights)}, store of keys and values {gib(kv)} (touched only as it fills)")
    print(f"        peak resident {gib(peak)}: {peak / weights:.2f} times the weights")


def run_once(model: str, quantization: str | None) -> dict[str, float]:
    """Seconds of each part, and the peak of the resident memory in bytes."""
    command = [sys.executable, "-m", "paceline", "run", model, PROMPT, "--max-tokens", "1", "--log-level", "info"]
    if quantization:
        command += ["--quantization", quantization]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    first = time.perf_counter() - begin
    log = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    end = time.perf_counter() - begin
    parts = PARTS.search(log)
    if status or parts is None:
        raise SystemExit(log)
    opened, packed, sized = map(float, parts.groups())
    return {
        "open the file": opened,
        "pack the weights, read tokenizer": packed,
        "size and allocate the store": sized,
        "interpreter, imports, prompt, token": first - opened - packed - sized,
        "first token": first,
        "end of the process": end,
        "peak": usage.ru_maxrss * 1024,
    }


def import_times() -> Counter[str]:
    """Microseconds that the command's imports take, by package."""
    command = [sys.executable, "-X", "importtime", "-c", "import paceline.api.cli.run, paceline.text.chat_template"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    times: Counter[str] = Counter()
    for line in done.stderr.splitlines()[1:]:
        own, _, name = line.removeprefix("import time:").split("|")
        package = name.strip().split(".")[0]
        known = package in ("numpy", "paceline", "jinja2", "tokenizers", "threadpoolctl")
        times[package if known else "the standard library and others"] += int(own)
    return times


def sizes(model: str, quantization: str | None) -> tuple[int, int]:
    """Bytes of the packed matrices, and of the store."""
    command = [sys.executable, "-c", SIZES, model, quantization or ""]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    weights, kv = json.loads(done.stdout)
    return weights, kv


def environment() -> dict[str, str]:
    """This process's, but modules may be kept compiled, as they are where Paceline is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    main()
