"""How often each token occurred in a sequence, kept up to date as the sequence grows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.tensors import IntArray


class TokenCounts:
    """The distinct tokens of a sequence, with their number of occurrences in its output.

    Exactly a function of ``prompt`` and of the output so far: tokens that were added one by one and tokens that were
    given at the start (as after a preemption) leave the same arrays. These are ready to be listed in a step's edits.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._index = {token: i for i, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, np.int32, len(distinct))
        self._counts = np.zeros(len(distinct), np.int32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """The output grows by ``token``."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int32)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int32)))
        self._ids[index] = token
        self._counts[index] += 1

    @property
    def ids(self) -> IntArray:
        """[N] int32, each token once, in the order of first occurrence. A view."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> IntArray:
        """[N] int32, occurrences in the output; 0 for a token of the prompt alone. A view."""
        return self._counts[: len(self._index)]
