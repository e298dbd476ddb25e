"""Tokenizers as GGUF metadata, small ones, and files around them that llama.cpp can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from paceline.tensors import Encoding
from support.gguf_files import write_gguf
from support.raw_tensors import encode
from support.text_corpus import TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CONTROL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BLANKS = ["\n\n", "\t\t"]
WIDTH = 32


def byte_level_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    """The kind ``gpt2``. Its merges span blanks, digits and marks, so that every cut between words shows."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=CONTROL_TEXTS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=4,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    tokens, merges = _trained(backend)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in CONTROL_TEXTS else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_metadata(*, add_space_prefix: bool) -> dict[str, Any]:
    """The kind ``llama``: a score for each token, single bytes, and runs of blanks defined by the user."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=1100, limit_alphabet=150, max_token_length=6, show_progress=False)
    # llama.cpp reads the texts of tokens as C strings.
    backend.train_from_iterator([text for text in TEXTS if "\0" not in text], trainer)
    trained, _ = _trained(backend)
    pieces = [text for text in trained if len(text) > 1 and text not in BLANKS]
    characters = [text for text in trained if len(text) == 1]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *BLANKS]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED] * len(BLANKS)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + pieces + characters,
        "tokenizer.ggml.token_type": types + [NORMAL] * (len(pieces) + len(characters)),
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(rank) for rank in range(len(pieces) + len(characters))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def _trained(backend: Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as GGUF files write them."""
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def write_model(path: Path, tokenizer: dict[str, Any]) -> Path:
    """A file with this tokenizer and one layer of zeros, of the architecture that llama.cpp is named after."""
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": WIDTH,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        **tokenizer,
    }
    typed = {key: _typed(value) for key, value in metadata.items()}
    typed["llama.attention.layer_norm_rms_epsilon"] = ("float32", 1e-5)
    square, row = (WIDTH, WIDTH), (WIDTH,)
    shapes = {"token_embd": (len(tokenizer["tokenizer.ggml.tokens"]), WIDTH), "output_norm": row}
    shapes |= {f"blk.0.{name}": row for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": square for name in ("gate", "up", "down")}
    tensors = [encode(np.zeros(shape, np.float32), Encoding.F32, f"{name}.weight") for name, shape in shapes.items()]
    write_gguf(path, typed, tensors)
    return path


def _typed(value: Any) -> Any:
    if isinstance(value, bool):
        return "bool", value
    return ("uint32", value) if isinstance(value, int) else value
