"""``paceline inspect``: what is in a model's files, and what running it takes. No weights are read."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable

from paceline.checkpoint.fetch import resolve_model
from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.config import DEFAULT_BLOCK_SIZE, read_environment
from paceline.errors import CheckpointError
from paceline.models.registry import read_spec
from paceline.models.spec import ModelSpec
from paceline.models.weights import head_tensor
from paceline.ops.api import Ops
from paceline.ops.select import make_ops
from paceline.runner.memory import gib
from paceline.tensors import Encoding, RawTensor
from paceline.text.chat_template import load_chat_template
from paceline.text.tokenizer import Tokenizer, load_tokenizer


def inspect(args: argparse.Namespace) -> int:
    environment = read_environment()
    path = resolve_model(args.model, cache=environment.cache, offline=environment.offline)
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint)
    ops = make_ops("auto", 1, quantization=args.quantization)
    _print_table(_model_rows(checkpoint, spec, ops))
    print()
    _print_table(_tensor_rows(checkpoint, ops), header=("type", "tensors", "elements", "bytes", "matrices run as"))
    print()
    try:
        tokenizer = load_tokenizer(checkpoint)
        template = load_chat_template(checkpoint, tokenizer)
    except CheckpointError as error:
        print(f"tokenizer: {error}")
        return 1
    source = None if template is None else template.sources
    _print_table(_text_rows(tokenizer, spec, source))
    if args.template and source is not None:
        print(f"\n{source}")
    if args.tensors:
        print()
        rows = [(t.name, "x".join(map(str, t.shape)), t.encoding.label) for t in checkpoint.tensors.values()]
        _print_table(rows, header=("tensor", "shape", "type"))
    return 0


def _model_rows(checkpoint: Checkpoint, spec: ModelSpec, ops: Ops) -> list[tuple[str, str]]:
    windows = sorted({layer.window for layer in spec.layers} - {0})
    sliding = sum(layer.window > 0 for layer in spec.layers)
    block = ops.kv_block_bytes(spec.kv_layout, DEFAULT_BLOCK_SIZE)
    per_token = block / DEFAULT_BLOCK_SIZE
    context = spec.max_position_embeddings
    head = checkpoint.tensors[head_tensor(checkpoint, spec)]
    head_form = ops.linear_form(head.encoding, sensitive=True)
    return [
        ("path", str(checkpoint.path)),
        ("format", checkpoint.format.value),
        ("architecture", spec.architecture),
        ("parameters", f"{_elements(checkpoint):,}"),
        ("layers", f"{spec.num_layers}" + (f" ({sliding} with a window of {windows})" if sliding else "")),
        ("hidden, feed-forward", f"{spec.hidden_size}, {spec.intermediate_size}"),
        ("heads", f"{spec.num_heads} query, {spec.num_kv_heads} key-value, of {spec.head_dim}"),
        ("vocabulary", f"{spec.vocab_size}"),
        ("output head", f"{'tied to the embedding' if spec.tied_head else 'its own'}, runs as {head_form}"),
        ("context", f"{context} tokens"),
        ("weights in the file", gib(sum(tensor.data.nbytes for tensor in checkpoint.tensors.values()))),
        ("keys and values", f"{gib(per_token * 1024)} for 1,024 tokens, {gib(per_token * context)} for a full context"),
    ]


def _text_rows(tokenizer: Tokenizer, spec: ModelSpec, template: str | None) -> list[tuple[str, str]]:
    ends = sorted({*tokenizer.eos_ids, *spec.eos_token_ids})
    return [
        ("tokenizer", f"{tokenizer.vocab_size} tokens, {len(tokenizer.special_ids)} of them special"),
        (
            "begins with",
            tokenizer.token_text(tokenizer.bos_id) if tokenizer.adds_bos and tokenizer.bos_id else "nothing",
        ),
        ("ends at", ", ".join(f"{tokenizer.token_text(i)} ({i})" for i in ends) or "no token"),
        ("chat template", "none" if template is None else f"{len(template)} characters (--template prints it)"),
    ]


def _tensor_rows(checkpoint: Checkpoint, ops: Ops) -> list[tuple[str, str, str, str, str]]:
    groups: dict[Encoding, list[RawTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        groups[tensor.encoding].append(tensor)
    return [
        (
            encoding.label,
            str(len(group)),
            f"{sum(math.prod(t.shape) for t in group):,}",
            gib(sum(t.data.nbytes for t in group)),
            ops.linear_form(encoding) if any(len(t.shape) > 1 for t in group) else "-",
        )
        for encoding, group in sorted(groups.items(), key=lambda item: item[0].label)
    ]


def _elements(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def _print_table(rows: Iterable[tuple[str, ...]], header: tuple[str, ...] | None = None) -> None:
    lines = [*([header] if header else []), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
