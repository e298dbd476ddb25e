"""How many prompt tokens fit into a step for which running streams wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.types import SeqSpan

MIN_WORK = 32.0
"""The work on prompts that a step takes in whatever it costs, so that prompts get on beside any number of streams."""
TELLING_WORK = MIN_WORK / 2
"""The work on prompts from which on a step tells something of their pace: less is lost in reading the weights."""
FORGET = 0.25
"""Weight of a step that was faster than those before it. A slower one counts in full: streams wait for it."""


class Pace:
    """Learns from finished steps how long a unit of work takes: one token's matrix products, at any length of context.

    What a step computes depends on it, and no token of any answer does.

    Args:
        target_seconds: how long a step that carries on streams may take.
        pair_cost: the work of attending to one earlier position.
    """

    def __init__(self, target_seconds: float, pair_cost: float) -> None:
        self._target = target_seconds
        self._pair_cost = pair_cost
        self._seconds_per_work: float | None = None

    def work(self, start: int, count: int) -> float:
        """Of computing tokens ``start .. start + count`` of a sequence."""
        return count + self._pair_cost * count * (start + (count + 1) / 2)

    def learn(self, spans: Sequence[SeqSpan], seconds: float) -> None:
        """Take in how long a step took."""
        of_prompts = sum(self.work(span.start, span.count) for span in spans if span.count > 1)
        if seconds <= 0 or of_prompts < TELLING_WORK:
            return
        measured = seconds / sum(self.work(span.start, span.count) for span in spans)
        known = self._seconds_per_work
        if known is None or measured > known:
            self._seconds_per_work = measured
        else:
            self._seconds_per_work = known + FORGET * (measured - known)

    def room(self, spans: Sequence[SeqSpan]) -> float:
        """The work on prompts that fits into a step beside these spans, as far as it is known yet."""
        if self._seconds_per_work is None:
            return MIN_WORK
        fitting = self._target / self._seconds_per_work - sum(self.work(span.start, span.count) for span in spans)
        return max(fitting, MIN_WORK)

    def fitting(self, start: int, room: float) -> int:
        """The number of tokens from ``start`` on that ``room`` suffices for: the root of ``work(start, n) = room``."""
        linear, square = 1 + self._pair_cost * (start + 0.5), self._pair_cost / 2
        # The usual formula, turned so that it holds for square = 0 as well.
        return int(2 * room / (linear + math.sqrt(linear * linear + 4 * square * room)))
