"""A runner that says what it was told to say: for tests of what happens to tokens afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.types import SeqResult, StepPlan, StepResult, TokenLogprobs

Script = Callable[[tuple[int, ...]], int]
"""From a sequence's prompt and output so far to its next token."""


def saying(prompt_length: int, text: str | bytes | Sequence[int]) -> Script:
    """The bytes of a text, one token each, and then end of sequence for ever."""
    ids = list(text.encode() if isinstance(text, str) else text)
    return lambda tokens: [*ids, 256][min(len(tokens) - prompt_length, len(ids))]


class ScriptedRunner:
    """Runs any plan; the log-probability of each token is minus its id.

    With ``hold_at`` it stands still in that step until ``gate`` is set, so that a test can do something meanwhile.
    """

    def __init__(self, script: Script, *, hold_at: int | None = None) -> None:
        self.gate = threading.Event()
        self._script = script
        self._hold_at = hold_at
        self._tokens: dict[int, list[int]] = {}
        self._num_prompt: dict[int, int] = {}
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self._hold_at:
            assert self.gate.wait(30)
        for start in plan.start:
            self._tokens[start.slot] = list(start.tokens)
            self._num_prompt[start.slot] = start.num_prompt
        results = []
        for span in plan.spans:
            tokens = self._tokens[span.slot]
            last = min(span.start + span.count, self._num_prompt[span.slot] - 1)
            scores = tuple(TokenLogprobs(t, -float(t), 1) for t in tokens[span.start + 1 : last + 1])
            if not span.sample:
                results.append(SeqResult(span.slot, prompt_logprobs=scores))
                continue
            token = self._script(tuple(tokens))
            tokens.append(token)
            results.append(SeqResult(span.slot, (token,), (TokenLogprobs(token, -float(token), 1),), scores))
        return StepResult(plan.step, tuple(results))
