"""Where a sequence stands in its thinking, and what its budget does about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from enum import Enum

from paceline.types import ThinkingBudget


class _Phase(Enum):
    BEFORE = "nothing has begun yet"
    THINKING = "a block is open"
    AFTER = "the block has ended, and whatever follows is the answer"


class SequenceThinking:
    """Follows one sequence through its one block of thinking: a function of the budget and of the tokens alone.

    A block that the prompt leaves open goes on in the output, where its tokens are counted from nought; otherwise the
    first start sequence in the output opens it. The block ends with its first end sequence, or with the closing
    sequence that follows a used budget. What comes after it is free.
    """

    def __init__(self, budget: ThinkingBudget, tokens: Sequence[int], num_prompt: int) -> None:
        self._budget = budget
        self._tail: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end)))
        self._phase = _Phase.BEFORE
        self._num_thought = 0
        self._num_closed = 0
        for token in tokens[:num_prompt]:
            self._tail.append(token)
            if self._phase is _Phase.BEFORE and self._follows(budget.start):
                self._phase = _Phase.THINKING
            elif self._phase is _Phase.THINKING and self._follows(budget.end):
                self._phase = _Phase.BEFORE  # an earlier turn's
        for token in tokens[num_prompt:]:
            self.commit(token)

    def commit(self, token: int) -> None:
        """The output grows by ``token``."""
        budget = self._budget
        self._tail.append(token)
        if self._phase is _Phase.BEFORE:
            if self._follows(budget.start):
                self._phase = _Phase.THINKING
        elif self._phase is _Phase.THINKING:
            if self.forced() == token:
                self._num_closed += 1
                if self._num_closed == len(budget.close):
                    self._phase = _Phase.AFTER
            else:
                self._num_closed = 0
                self._num_thought += 1
                if self._follows(budget.end):
                    self._phase = _Phase.AFTER

    def forced(self) -> int | None:
        """The token that has to come next, because the budget is used up; None while the choice is free."""
        if self._phase is _Phase.THINKING and self._num_thought >= self._budget.limit:
            return self._budget.close[self._num_closed]
        return None

    def settle(self, token: int, eos_token_ids: Container[int]) -> int:
        """What stands in the place of a chosen token: for an end of sequence while thinking, the end of the thinking.

        If the end is a sequence, it is its token after those that the output ends with already. So each end of
        sequence brings the block's end nearer, and what was chosen before need not be known.
        """
        if self._phase is not _Phase.THINKING or token not in eos_token_ids:
            return token
        end = self._budget.end
        begun = max(length for length in range(len(end)) if self._follows(end[:length]))
        return end[begun]

    def _follows(self, sequence: Sequence[int]) -> bool:
        """Whether the tokens so far end with ``sequence``."""
        length = len(sequence)
        return length <= len(self._tail) and list(self._tail)[len(self._tail) - length :] == list(sequence)
