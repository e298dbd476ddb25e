"""What every source of a tokenizer, a folder or a GGUF file, boils down to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import tokenizers


class TokenCoding(Enum):
    """How the text of a vocabulary entry stands for bytes.

    BYTE_LEVEL: each character is one byte, by GPT-2's table of 256 printable characters.
    METASPACE: UTF-8, with U+2581 for a space, and ``<0xAB>`` for a byte that no other entry covers.
    """

    BYTE_LEVEL = "byte-level"
    METASPACE = "metaspace"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts that :class:`~paceline.text.tokenizer.Tokenizer` is made of.

    Attributes:
        backend: turns text into ids; its added tokens say which ids are special (control tokens).
        coding: how entries that are not added tokens stand for bytes.
        strips_space: entries carry the space before a word, so decoding drops one at the very start.
        vocab_size: ids from here on are not tokens.
        eos_ids: the end tokens, the one that the tokenizer names as such first.
        unk_id: the token for what the vocabulary cannot spell.
        prefix, suffix: ids around a raw prompt, by the tokenizer's own setting.
    """

    backend: tokenizers.Tokenizer
    coding: TokenCoding
    strips_space: bool
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    unk_id: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
