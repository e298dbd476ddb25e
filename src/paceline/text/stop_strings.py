"""Stop strings, searched in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text up to the first stop string, and holds back only what could still become one.

    The output ends as soon as it contains a stop string, wherever the borders of the pieces lie: the match that is
    complete first counts, and of those that are complete at the same character the longest. The text is cut where that
    match begins, or after it with ``include``.

    Attributes:
        matched: the stop string that was found. Later pieces are dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._stops = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str:
        """Add a piece; returns what it releases. A match that ends in a piece that does not count is ignored."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        for index, character in enumerate(text, start=len(self._held) - len(text) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete and counts:
                self.matched = max(complete, key=len)
                released = self._held[: index if self._include else index - len(self.matched)]
                self._held = ""
                return released
        keep = max(stop.length for stop in self._stops)
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def finish(self) -> str:
        """What was held back, once it is clear that nothing follows."""
        released, self._held = self._held, ""
        return released


class _Progress:
    """How far the end of a text agrees with the beginning of one stop string (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # borders[n]: the longest proper prefix of text[:n] that is also its suffix.
        self._borders = [0, 0]
        for end in range(1, len(text)):
            border = self._borders[end]
            while border and text[border] != text[end]:
                border = self._borders[border]
            self._borders.append(border + (text[border] == text[end]))

    def advance(self, character: str) -> bool:
        """Add a character to the text; whether it completes the stop string.

        Afterwards ``length`` characters at the end of the text are the longest beginning of one that may still come.
        """
        while self.length and self.text[self.length] != character:
            self.length = self._borders[self.length]
        self.length += self.text[self.length] == character
        if self.length < len(self.text):
            return False
        self.length = self._borders[self.length]
        return True
