"""How speed changes with the context, with the batch, and with the size of the model.

    pip install gguf
    python benchmarks/growth.py [MODEL.gguf] [--only context batch size]

* context: one request with a prompt of so many tokens; prompt tokens per second, and the speed of the tokens after it.
* batch: so many prompts of 128 tokens, 64 new tokens each; new tokens per second, without the prefill.
* size: a random Llama of 1.07 billion parameters with the tokenizer of MODEL (a GGUF file), made in a temporary folder
  (2.1 GB): as bfloat16, and packed as int4 while it is loaded. Its batches have prompts of 16 tokens, 32 new ones each.

Run nothing beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np

from convert import copy_fields, finish
from engines import Contestant, Paceline
from measuring import machine, print_table
from paceline.checkpoint.fetch import resolve_model
from paceline.config import DEFAULT_MODEL, read_environment
from paceline.ops.threads import usable_cores
from paceline.runner.memory import gib
from workload import WORKLOAD, measure_decode, rotated

CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NEW_TOKENS = 32
GROUPS = ("context", "batch", "size")
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 16, 32, 8, 64
"""The random model, but for its vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure speed by context, batch and size of the model.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=usable_cores()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    args = parser.parse_args()
    environment = read_environment()
    model = resolve_model(args.model, cache=environment.cache, offline=environment.offline)
    print(f"{machine()}; {args.threads} threads; tokens/s\n")
    if {"context", "batch"} & set(args.only):
        engine = make_engine(model, args.threads)
        if "context" in args.only:
            rows = [[f"{context}", *prefill_and_decode(engine, context)] for context in CONTEXTS]
            print_table(["context", "prefill", "decode, batch 1"], rows)
        if "batch" in args.only:
            print_table(["batch", "decode"], [[f"{batch}", decode(engine, batch, 128, 64)] for batch in BATCHES])
        del engine
    if "size" in args.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random-BF16.gguf"
            parameters = write_random_model(model, path)
            print(f"random Llama of {parameters / 1e9:.2f} billion parameters, {gib(path.stat().st_size)}\n")
            rows = []
            for quantization in (None, "int4"):
                engine = make_engine(path, args.threads, quantization)
                prefill, _ = prefill_and_decode(engine, 512)
                speeds = [decode(engine, batch, 16, NEW_TOKENS) for batch in (1, 8)]
                rows.append([quantization or "bfloat16", prefill, *speeds])
                del engine
            print_table(["weights", "prefill 512", "decode, batch 1", "decode, batch 8"], rows)


def make_engine(model: Path, threads: int, quantization: str | None = None) -> Paceline:
    return Paceline(str(model), num_threads=threads, quantization=quantization, kv_cache_memory=2 * 2**30)


def prefill_and_decode(engine: Contestant, context: int) -> tuple[str, str]:
    """Tokens per second of a prompt of this length, and of those that follow it."""
    tokens = WORKLOAD["prefill2048"]
    prompt = (tokens * (context // len(tokens) + 1))[:context]
    run = engine.run([prompt], [NEW_TOKENS + 1])
    return f"{context / run.first_token:.0f}", f"{NEW_TOKENS / (run.seconds - run.first_token):.1f}"


def decode(engine: Contestant, batch: int, prompt_length: int, new_tokens: int) -> str:
    """New tokens per second of so many requests at once."""
    prompts = WORKLOAD["batch"]
    batch_prompts = [rotated(prompts[i % len(prompts)], i)[:prompt_length] for i in range(batch)]
    return f"{measure_decode(engine, batch_prompts, new_tokens).speed:.1f}"


def write_random_model(template: Path, path: Path) -> int:
    """A Llama with random weights in bfloat16, its tokenizer from a GGUF file of the same architecture: its size."""
    reader = gguf.GGUFReader(template)
    vocabulary = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    writer = gguf.GGUFWriter(path, "llama")
    changes = {
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    }
    copy_fields(reader, writer, {f"llama.{name}": value for name, value in changes.items()})
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    # The same numbers again and again, out of step with the rows: making new ones would take most of the time.
    numbers = np.random.default_rng(0).standard_normal(1_000_003, np.float32) / np.sqrt(HIDDEN, dtype=np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            matrix = np.resize(bits, shape).view(np.uint8)
            writer.add_tensor(f"{name}.weight", matrix, raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)
    return sum(int(np.prod(shape)) for shape in shapes.values())


if __name__ == "__main__":
    main()
