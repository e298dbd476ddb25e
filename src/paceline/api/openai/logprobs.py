"""Log-probabilities in the shapes of the interface: chat and plain completions have different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.outputs import ChoiceDelta
from paceline.text.tokenizer import Tokenizer
from paceline.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is only a part of a character as ``bytes:\\xe2\\x80``."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _likeliest(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return pairs if count == -1 else pairs[:count]


# ---- chat


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], count: int) -> dict[str, Any]:
    """``count`` is the number of likeliest tokens to list, -1 for all there are."""
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, *pair) for pair in _likeliest(entry, count)],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


# ---- plain completions


@dataclass(slots=True)
class CompletionLogprobs:
    """Four lists of equal length. ``text_offset`` counts characters from the start of the choice's whole text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokenizer: Tokenizer, token: int, entry: TokenLogprobs | None, count: int, offset: int) -> None:
        self.tokens.append(token_name(tokenizer, token))
        self.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        self.top_logprobs.append(None if entry is None else _top_by_name(tokenizer, entry, count))
        self.text_offset.append(offset)


def _top_by_name(tokenizer: Tokenizer, entry: TokenLogprobs, count: int) -> dict[str, float]:
    """The likeliest tokens and the one that stands there. Of tokens with the same text the likeliest one is shown."""
    named: dict[str, float] = {}
    for token, logprob in [*_likeliest(entry, count), (entry.token_id, entry.logprob)]:
        named.setdefault(token_name(tokenizer, token), _finite(logprob))
    return named


class OffsetCounter:
    """Where each token of a choice starts in its text. A token inside a character starts where the character does."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, start: int = 0, prompt_tail: Sequence[int] = ()):
        self._detokenizer = tokenizer.detokenizer(skip_special=skip_special, prompt_tail=prompt_tail)
        self._offset = start

    def next(self, token: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push([token]))
        return offset


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str, *, skip_special: bool) -> list[int]:
    """Where each token of a prompt starts in ``text``, from which it was made or into which it decodes.

    Tokens that the tokenizer put in front by its own rules have no place in the text: they start at 0.
    """
    counter = OffsetCounter(tokenizer, skip_special=skip_special)
    offsets = [counter.next(token) for token in tokens]
    excess = max(len(tokenizer.decode(tokens, skip_special=skip_special)) - len(text), 0)
    return [min(max(offset - excess, 0), len(text)) for offset in offsets]


def delta_logprobs(
    tokenizer: Tokenizer, delta: ChoiceDelta, count: int, offsets: OffsetCounter, text_length: int
) -> CompletionLogprobs:
    """The part of a choice's logprobs that a delta brings; ``text_length`` is that of the text up to its end."""
    part = CompletionLogprobs()
    for token, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        part.add(tokenizer, token, entry, count, min(offsets.next(token), text_length))
    return part


def prompt_logprobs_by_id(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], count: int
) -> list[dict[str, Any] | None]:
    """The extension ``prompt_logprobs``: each position's token and the likeliest ones, by id; the first is null."""
    return [None if entry is None else _ranked_by_id(tokenizer, entry, count) for entry in entries]


def _ranked_by_id(tokenizer: Tokenizer, entry: TokenLogprobs, count: int) -> dict[str, Any]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for position, (token, logprob) in enumerate(_likeliest(entry, count)):
        ranked.setdefault(token, (logprob, position + 1))
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_name(tokenizer, token)}
        for token, (logprob, rank) in ranked.items()
    }
