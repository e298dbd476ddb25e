"""What number formats cost: perplexity and agreement on a fixed text, ``quality.txt``.

    python benchmarks/quality.py MODEL [--tokens 2000]

Every position of the text is read once by each of

* reference: float32 arithmetic with the file's numbers, and float32 keys and values (``--ops reference``);
* as stored: the native kernels with the weights as the file has them;
* int8, int4: the native kernels with ``--quantization``, where the file has dense matrices.

Against the reference, and against the weights as stored, are given: how often the likeliest next token is the same one,
and the mean of |log p - log p'| of the token that was the likeliest there. Nothing is sampled, so all read the same
tokens at every position.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measuring import print_table
from paceline.checkpoint.fetch import resolve_model
from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.config import DEFAULT_MODEL, read_environment
from paceline.models.weights import has_dense_matrices, load_model
from paceline.ops.api import Ops
from paceline.ops.select import make_ops
from paceline.runner.batch import build_batch
from paceline.slots import Slots
from paceline.tensors import FloatArray
from paceline.text.tokenizer import load_tokenizer
from paceline.types import SeqSpan, SeqStart, TokenRules

TEXT = Path(__file__).with_name("quality.txt")
FORMS = ("reference", "as stored", "int8", "int4")
BASES = ("reference", "as stored")
BLOCK_SIZE = 32
SPAN = 128
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True)
class Reading:
    """What one implementation said at each position: [T] each.

    ``truth`` is the log-probability of the token that follows; ``greedy`` the likeliest token, and ``best`` its
    log-probability. ``watched`` are the log-probabilities of the base's likeliest tokens, by the base's name.
    """

    truth: FloatArray
    greedy: np.ndarray
    best: FloatArray
    watched: dict[str, FloatArray]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.truth.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what number formats cost in quality.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2000, help="read at most so many tokens of the text")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    environment = read_environment()
    checkpoint = open_checkpoint(resolve_model(args.model, cache=environment.cache, offline=environment.offline))
    tokens = load_tokenizer(checkpoint).encode(TEXT.read_text(), add_special=True)[: args.tokens]
    forms: dict[str, Ops] = {"reference": make_ops("reference", 1), "as stored": make_ops("cpu", None)}
    if has_dense_matrices(checkpoint):
        forms |= {name: make_ops("cpu", None, quantization=name) for name in ("int8", "int4")}

    readings: dict[str, Reading] = {}
    rows = []
    for name in args.forms:
        if name not in forms:
            continue
        bases = {base: readings[base] for base in BASES if base in readings}
        reading = read(checkpoint, forms[name], tokens, {base: bases[base].greedy for base in bases})
        compared = [compare(reading, bases[base], base) if base in bases else ("", "") for base in BASES]
        rows.append([name, f"{reading.perplexity:.4f}", *(cell for pair in compared for cell in pair)])
        readings[name] = reading
    print(f"{checkpoint.path.name}: {len(tokens)} tokens of {TEXT.name}\n")
    titles = [title for base in BASES for title in (f"same token as {base}", f"mean change from {base}")]
    print_table(["weights", "perplexity", *titles], rows)


def compare(reading: Reading, base: Reading, base_name: str) -> tuple[str, str]:
    """How often the likeliest token is the base's, and the mean |log p - log p'| of the base's likeliest token."""
    agreement = (reading.greedy == base.greedy).mean()
    change = np.abs(reading.watched[base_name] - base.best).mean()
    return f"{agreement:.2%}", f"{change:.4f}"


def read(checkpoint: Checkpoint, ops: Ops, tokens: list[int], watch: dict[str, np.ndarray]) -> Reading:
    """Run the tokens through the model. ``watch`` are token ids by position whose log-probability is wanted, too."""
    model = load_model(checkpoint, ops, max_positions=len(tokens))
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    kv = ops.make_kv(model.kv_layout, len(blocks), BLOCK_SIZE)
    slots = Slots(1, len(tokens), BLOCK_SIZE)
    slots.start(SeqStart(0, tuple(tokens), len(tokens), 0, tuple(blocks), TokenRules()))
    truth, greedy, best = [], [], []
    watched: dict[str, list[FloatArray]] = {name: [] for name in watch}
    last = len(tokens) - 1
    for first in range(0, last, SPAN):
        count = min(SPAN, last - first)
        hidden = model.forward(build_batch([SeqSpan(0, first, count)], slots), kv)
        scores = log_softmax(model.logits(hidden))
        rows = np.arange(count)
        truth.append(scores[rows, tokens[first + 1 : first + 1 + count]])
        greedy.append(scores.argmax(axis=1))
        best.append(scores[rows, greedy[-1]])
        for name, ids in watch.items():
            watched[name].append(scores[rows, ids[first : first + count]])
    return Reading(
        np.concatenate(truth),
        np.concatenate(greedy),
        np.concatenate(best),
        {name: np.concatenate(parts) for name, parts in watched.items()},
    )


def log_softmax(logits: FloatArray) -> FloatArray:
    z = logits - logits.max(axis=1, keepdims=True)
    result: FloatArray = z - np.log(np.exp(z).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
    return result


if __name__ == "__main__":
    main()
