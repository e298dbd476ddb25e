"""Tokens to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence


class Detokenizer:
    """Decodes one sequence incrementally. It works on bytes, so it never splits a character.

    The texts of all pushes and of :meth:`finish` join to the text of the whole. Bytes that cannot become a character
    any more give U+FFFD at once, one for each maximal part of a character (the Unicode standard's practice); a
    beginning that may still be completed is held back.

    Args:
        token_bytes: the bytes of a token.
        skip: tokens that have no text here.
        strips_space: drop one space at the very start of a text.
        prompt_tail: the end of what comes before (or all of it). Its text is not given out, but a character that it
            leaves open is continued, and after it the sequence does not begin a text.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        skip: frozenset[int],
        strips_space: bool,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token in reversed(prompt_tail):
            tail = self._bytes([token]) + tail
            if len(tail) >= 4:  # no character is longer
                break
        self._decoder.decode(tail)
        self._strip_next = strips_space and not tail

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        data = self._bytes(tokens)
        if data and self._strip_next:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def holds_back(self) -> bool:
        """Whether the beginning of a character waits for its rest."""
        return bool(self._decoder.getstate()[0])

    def _bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self._token_bytes(token) for token in tokens if token not in self._skip)
