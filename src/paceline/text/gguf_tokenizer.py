"""A tokenizer from the metadata of a GGUF file alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from paceline.errors import CheckpointError
from paceline.text.parts import TokenCoding, TokenizerParts
from paceline.text.pretokenizers import PRE_TOKENIZERS

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CONTROL_TYPES = (CONTROL, UNKNOWN)
END_TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Control tokens that end an answer by common use. A GGUF file often names only one end token, and has no
generation config to name the others."""


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: Path) -> TokenizerParts:
    """Raises CheckpointError naming the key that is missing, malformed or not supported."""
    keys = _Keys(metadata, source)
    kind = keys.text("model")
    if kind == "gpt2":
        return _byte_level(keys)
    if kind == "llama":
        return _sentencepiece(keys)
    raise keys.error("model", f"is {kind!r}, which is not supported (those that are: gpt2, llama)")


def _byte_level(keys: _Keys) -> TokenizerParts:
    name = keys.text("pre", default="default")
    if name not in PRE_TOKENIZERS:
        raise keys.error("pre", f"is {name!r}, which is not known (those that are: {', '.join(PRE_TOKENIZERS)})")
    pre = PRE_TOKENIZERS[name]
    vocabulary = _Vocabulary(keys)
    texts = keys.texts("merges")
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
    if not all(map(all, merges)):
        merge = next(text for text, pair in zip(texts, merges) if not all(pair))
        raise keys.error("merges", f"holds {merge!r}, which is not two tokens with a space between them")
    backend = _backend(keys, lambda: models.BPE(vocabulary.ids, merges, ignore_merges=pre.whole_words))
    backend.pre_tokenizer = pre.build()
    return _finish(
        keys, vocabulary, backend, TokenCoding.BYTE_LEVEL,
        strips_space=False, adds_bos=pre.adds_bos, bos_id=None, eos_id=None, unk_id=None,
    )  # fmt: skip


def _sentencepiece(keys: _Keys) -> TokenizerParts:
    vocabulary = _Vocabulary(keys)
    scores = keys.numbers("scores", len(vocabulary.tokens))
    merges = _derive_merges(vocabulary, scores)
    unk_id = keys.token_id("unknown_token_id", vocabulary, default=0)
    unk = None if unk_id is None else vocabulary.tokens[unk_id]
    backend = _backend(
        keys, lambda: models.BPE(vocabulary.ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    adds_space = keys.flag("add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if adds_space else spaces
    return _finish(
        keys, vocabulary, backend, TokenCoding.METASPACE,
        strips_space=adds_space, adds_bos=True, bos_id=1, eos_id=2, unk_id=unk_id,
    )  # fmt: skip


def _derive_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the third first.

    SentencePiece has no list of merges: of all neighbours whose joined text is a token it joins those with the best
    score. Only ordinary tokens take part: no text may spell a control token, and texts defined by the user are cut out
    beforehand.
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    by_score = sorted((i for i in range(len(tokens)) if types[i] in (NORMAL, UNUSED)), key=lambda i: -scores[i])
    parts = {tokens[i] for i in by_score}
    merges = []
    for index in by_score:
        token = tokens[index]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in parts:
                right = token[cut:]
                if right in parts:
                    merges.append((left, right))
    return merges


def _finish(
    keys: _Keys,
    vocabulary: _Vocabulary,
    backend: tokenizers.Tokenizer,
    coding: TokenCoding,
    *,
    strips_space: bool,
    adds_bos: bool,
    bos_id: int | None,
    eos_id: int | None,
    unk_id: int | None,
) -> TokenizerParts:
    """Add what both kinds share. ``*_id`` and ``adds_bos`` are what the kind implies where the file is silent."""
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in vocabulary.control])
    backend.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.user_defined])
    bos = keys.token_id("bos_token_id", vocabulary, default=bos_id)
    eos = keys.token_id("eos_token_id", vocabulary, default=eos_id)
    unk = keys.token_id("unknown_token_id", vocabulary, default=unk_id)
    ends = [eos, *(keys.token_id(key, vocabulary, default=None) for key in ("eot_token_id", "eom_token_id"))]
    ends += [vocabulary.control.get(text) for text in END_TEXTS]
    return TokenizerParts(
        backend=backend,
        coding=coding,
        strips_space=strips_space,
        vocab_size=vocabulary.size,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        unk_id=unk,
        prefix=keys.affix("add_bos_token", adds_bos, "bos_token_id", bos),
        suffix=keys.affix("add_eos_token", False, "eos_token_id", eos),
    )


def _backend(keys: _Keys, build: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(build())
    except Exception as error:  # the library has no exception of its own
        raise keys.error("merges", f"do not fit the vocabulary: {error}") from error


class _Vocabulary:
    """Tokens and their types. Entries at the end that only pad the model's table are no tokens: ``size`` omits them."""

    def __init__(self, keys: _Keys) -> None:
        # An empty entry cannot be told from others of its sort; it is never spelt by a text.
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(keys.texts("tokens"))]
        self.types = keys.integers("token_type", len(self.tokens), default=NORMAL)[: len(self.tokens)]
        self.size = len(self.types)
        while self.size and self.types[self.size - 1] == UNUSED:
            self.size -= 1
        if self.size == 0:
            raise keys.error("tokens", "is empty")
        self.ids = dict(zip(self.tokens, range(len(self.tokens))))
        if len(self.ids) != len(self.tokens):
            index = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise keys.error(
                "tokens", f"holds {self.tokens[index]!r} twice, as {index} and {self.ids[self.tokens[index]]}"
            )
        self.control = {text: i for i, (text, kind) in enumerate(zip(self.tokens, self.types)) if kind in CONTROL_TYPES}
        self.user_defined = [text for text, kind in zip(self.tokens, self.types) if kind == USER_DEFINED]


class _Keys:
    """The tokenizer's keys, each read with the type it must have."""

    def __init__(self, metadata: Mapping[str, Any], source: Path) -> None:
        self._metadata = metadata
        self._source = source

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {PREFIX}{key} {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def texts(self, key: str) -> list[str]:
        values = self._get(key, None)
        if not isinstance(values, list) or not set(map(type, values)) <= {str}:
            raise self.error(key, "must be a list of strings")
        return values

    def integers(self, key: str, count: int, default: int) -> list[int]:
        values = self._get(key, [default] * count)
        if not isinstance(values, list) or not set(map(type, values)) <= {int}:
            raise self.error(key, "must be a list of integers")
        self._check_count(key, len(values), count)
        return values

    def numbers(self, key: str, count: int) -> list[float]:
        values = self._get(key, None)
        if not isinstance(values, list) or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
            raise self.error(key, "must be a list of finite numbers")
        self._check_count(key, len(values), count)
        return values

    def token_id(self, key: str, vocabulary: _Vocabulary, default: int | None) -> int | None:
        """A default counts only where the vocabulary has a control token there."""
        value = self._metadata.get(PREFIX + key)
        if value is None:
            if default is None or default >= vocabulary.size or vocabulary.tokens[default] not in vocabulary.control:
                return None
            return default
        if type(value) is not int or not 0 <= value < len(vocabulary.tokens):
            raise self.error(key, f"is {value!r}, but the vocabulary has ids 0 to {len(vocabulary.tokens) - 1}")
        return value

    def affix(self, key: str, default: bool, id_key: str, token_id: int | None) -> tuple[int, ...]:
        """The token that a raw prompt gets if the flag is on."""
        if not self.flag(key, default):
            return ()
        if token_id is None:
            raise self.error(id_key, f"is missing, but {PREFIX}{key} asks for this token")
        return (token_id,)

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(PREFIX + key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _check_count(self, key: str, count: int, expected: int) -> None:
        if count < expected:
            raise self.error(key, f"has {count} entries, but {PREFIX}tokens has {expected}")
