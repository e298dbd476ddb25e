"""Text to tokens and back."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import RequestError
from paceline.text.control_names import ControlNames
from paceline.text.detokenizer import Detokenizer
from paceline.text.folder_tokenizer import TOKENIZER_FILE, read_folder_tokenizer
from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.parts import TokenizerParts
from paceline.text.token_bytes import added_bytes, entry_bytes


def load_tokenizer(checkpoint: Checkpoint, override: Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, or the one in ``override``: a folder, its ``tokenizer.json``, or a GGUF file.

    Raises CheckpointError naming the file, and the item in it, that is missing or not supported.
    """
    if override is None and checkpoint.format is CheckpointFormat.SAFETENSORS:
        override = checkpoint.path
    if override is None:
        return Tokenizer(read_gguf_tokenizer(checkpoint.metadata, checkpoint.path))
    if override.suffix == ".gguf":
        return Tokenizer(read_gguf_tokenizer(open_checkpoint(override).metadata, override))
    return Tokenizer(read_folder_tokenizer(override.parent if override.name == TOKENIZER_FILE else override))


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Attributes:
        vocab_size: ids from here on are not tokens and must never be sampled.
        bos_id, bos_token: the token that begins a text, and its text for templates; None if there is none.
        eos_ids: what the tokenizer itself knows to be an end.
        eos_token: the text of the first of them, for templates; None if there is none.
        special_ids: control tokens; they have no text unless it is asked for.
        adds_bos: a raw prompt begins with BOS.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        added = self._backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for; most are, again and again
        self._lock = threading.Lock()  # the backend's switch for control tokens is shared
        self._control_names: ControlNames | None = None
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.bos_token = None if parts.bos_id is None else self._backend.id_to_token(parts.bos_id)
        self.eos_token = self._backend.id_to_token(parts.eos_ids[0]) if parts.eos_ids else None
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._never_plain = self.special_ids - {parts.unk_id}
        self.adds_bos = parts.bos_id is not None and parts.bos_id in parts.prefix

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """The tokens of a text. Raises RequestError for half a surrogate pair, which is no character.

        Args:
            add_special: put the tokens around it that the tokenizer's own setting asks for. A text that begins with
                BOS (or ends with EOS) already gets no second one.
            parse_special: the name of a control token in the text is that token. If not, it is text like any other.
        """
        with self._lock:
            ids = self._encode(text, parse_special)
        if add_special:
            prefix, suffix = list(self._parts.prefix), list(self._parts.suffix)
            if ids[: len(prefix)] != prefix:
                ids = prefix + ids
            if suffix and ids[-len(suffix) :] != suffix:
                ids += suffix
        return ids

    def encode_protected(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """The tokens of a text in which some characters are written by others.

        ``stand_ins`` maps these to the characters that they stand for. Names of control tokens are parsed, but not
        where a stand-in takes part. Apart from that the result is that of :meth:`encode` without ``add_special``.
        """
        with self._lock:
            if self._control_names is None:
                self._control_names = ControlNames(self._backend, self.control_pattern)
            names = self._control_names
            restored = names.write(text).translate({ord(key): value for key, value in stand_ins.items()})
            return [names.true_id(token) for token in self._encode(restored, parse_special=False)]

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """The text of tokens that are a text of their own. Bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.finish()

    def detokenizer(
        self, *, skip_special: bool, prompt_tail: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """An incremental decoder for tokens that follow ``prompt_tail``: the whole prompt, or its last few tokens.

        The tokens in ``shown`` are written, even if they are special.
        """
        return Detokenizer(
            self.token_bytes,
            skip=self.special_ids - shown if skip_special else frozenset(),
            strips_space=self._parts.strips_space,
            prompt_tail=prompt_tail,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; none for an id that is not a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token's text by itself, with U+FFFD for parts of characters. Control tokens are written by name."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the name of any control token; of several at one place the longest."""
        names = sorted((self._added[token] for token in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def spellings(self, word: str) -> tuple[list[int], list[int]]:
        """The tokens of a word that follows other text directly, and those of one that follows a space."""
        alone = self.encode(word, add_special=False)
        if not self._parts.strips_space:
            return alone, self.encode(" " + word, add_special=False)
        # Such a tokenizer puts a space before every text, so let it be before something else.
        anchor = self.encode("\n", add_special=False)
        joined = self.encode("\n" + word, add_special=False)
        return joined[len(anchor) :] if joined[: len(anchor)] == anchor else alone, alone

    def plain_encoder(self) -> Callable[[bytes], list[int]]:
        """Cuts bytes into tokens that join to exactly these bytes: as :meth:`encode` would, where it can be.

        Control tokens are not parsed. It works on a copy, so that it never waits for a text that is being encoded.
        """
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        by_bytes: dict[bytes, int] = {}
        for token in range(self.vocab_size):
            if token not in self.special_ids:
                by_bytes.setdefault(self.token_bytes(token), token)
        longest = max(map(len, by_bytes), default=0)

        def encode(data: bytes) -> list[int]:
            try:
                ids: list[int] = backend.encode(data.decode(), add_special_tokens=False).ids
            except UnicodeDecodeError:
                ids = []
            if b"".join(map(self.token_bytes, ids)) == data and self.special_ids.isdisjoint(ids):
                return ids
            return _cut_greedily(data, by_bytes, longest)

        return encode

    def _find_bytes(self, token_id: int) -> bytes:
        content = self._added.get(token_id)
        if content is not None:
            return added_bytes(content, self._parts.coding)
        entry = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if entry is None else entry_bytes(entry, self._parts.coding)

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        self._backend.encode_special_tokens = not parse_special
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # all that the library says of a string that is not valid Unicode
            at = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise RequestError(f"the text holds half a surrogate pair (U+{ord(text[at]):04X} at {at})") from None
        if parse_special:
            return ids
        if self._never_plain.isdisjoint(ids):
            return ids
        # The merges of an odd vocabulary can lead from plain text to a control token.
        return [piece for token in ids for piece in (self._spell(token) if token in self._never_plain else [token])]

    def _spell(self, token_id: int) -> list[int]:
        """A control token's name as text, character by character."""
        characters = self._added[token_id]
        pieces = [i for one in characters for i in self._backend.encode(one, add_special_tokens=False).ids]
        return [i for i in pieces if i not in self._never_plain]


def _cut_greedily(data: bytes, by_bytes: Mapping[bytes, int], longest: int) -> list[int]:
    """The longest known token at each place; stops where there is none."""
    ids: list[int] = []
    at = 0
    while at < len(data):
        length = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in by_bytes), 0)
        if length == 0:
            break
        ids.append(by_bytes[data[at : at + length]])
        at += length
    return ids


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens that spell these words, each with and without a space before it; no sequence twice."""
    sequences = {tuple(ids): None for word in words for ids in tokenizer.spellings(word)}
    sequences.pop((), None)
    return tuple(sequences)
