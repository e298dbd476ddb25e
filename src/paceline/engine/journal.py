"""The sequences in flight, with all that another engine needs to go on with them where their callers left off.

A sequence's next token depends on its own tokens and rules alone, so an engine that is lost can be replaced: what it
was given is given to the next one, together with what has been said. Nothing here knows processes or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.engine.messages import Submit
from paceline.types import TokenEvent, TokenRules

SUSPECT_AT = 2
"""Engines lost with a sequence in their last step, one after the other, that make it a suspect."""
GUILTY_AT = 4
"""Engines lost, the last two with this as the only suspect, that make a sequence be given up."""
PROGRESS = 2
"""New tokens that clear a sequence: the step in which the engine was lost chose the first, or the second of them."""


@dataclass(slots=True)
class _Sequence:
    request_id: str
    tokens: list[int]
    num_prompt: int
    rules: TokenRules
    priority: int
    cache_salt: str
    adapter: str | None
    num_scored: int = 0
    num_likely: int = 0
    num_cached_tokens: int | None = None
    num_losses: int = 0
    length_at_loss: int = 0

    @property
    def is_suspect(self) -> bool:
        return self.num_losses >= SUSPECT_AT


class Journal:
    """Knows which sequences the present engine has been given (sent), and which it still has to be (due).

    A sequence that may be what kills the engines is a suspect. Suspects are tried one at a time, and beside one only
    those run that were cleared just before; so each soon has the two new tokens that clear it, or it is the only one
    that can have been the cause when the engine is lost again, and again. Nobody loses by it: to compute the prompts
    together takes as long as one after the other.
    """

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}
        self._due: dict[str, None] = {}
        self._in_step: tuple[str, ...] = ()
        self._probation: str | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, requests: Sequence[Request]) -> None:
        """New sequences, after all others in the order of arrival."""
        for request in requests:
            self._sequences[request.request_id] = _Sequence(
                request.request_id, list(request.tokens), request.num_prompt, request.rules, request.priority,
                request.cache_salt, request.adapter,
            )  # fmt: skip
            self._due[request.request_id] = None

    def close(self, request_id: str) -> None:
        """A sequence has ended, or nobody wants it any more. Safe to repeat."""
        self._sequences.pop(request_id, None)
        self._due.pop(request_id, None)
        if self._probation == request_id:
            self._probation = None

    def record(self, event: TokenEvent) -> None:
        """What the engine has told of a sequence. News of one that is closed are of no interest."""
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = event.num_cached_tokens
        sequence.tokens += event.token_ids
        sequence.num_scored += len(event.prompt_logprobs)
        sequence.num_likely = event.num_likely
        if event.finish_reason is not None:
            self.close(event.request_id)
        elif sequence.num_losses and len(sequence.tokens) >= sequence.length_at_loss + PROGRESS:
            sequence.num_losses = 0
            if self._probation == event.request_id:
                self._probation = None

    def step_begins(self, request_ids: tuple[str, ...]) -> None:
        self._in_step = request_ids

    def take_due(self) -> list[Submit]:
        """The sequences that the engine is to be given now, in the order of their arrival; they count as sent."""
        if self._probation is not None:
            return []
        self._probation = next((each for each in self._due if self._sequences[each].is_suspect), None)
        taken = list(self._due) if self._probation is None else [self._probation]
        for request_id in taken:
            del self._due[request_id]
        return [_submit(self._sequences[request_id]) for request_id in taken]

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    def engine_lost(self) -> list[str]:
        """The engine is gone: everything is due again. Returns the sequences to be given up; close them."""
        given_up = []
        for request_id in self._in_step:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            sequence.num_losses += 1
            sequence.length_at_loss = len(sequence.tokens)
            if request_id == self._probation and sequence.num_losses >= GUILTY_AT:
                given_up.append(request_id)
        self._in_step = ()
        self._probation = None
        self._due = dict.fromkeys(self._sequences)
        return given_up

    def in_flight(self) -> list[tuple[str, int, int, bool]]:
        """(id, prompt tokens, output tokens, whether it was in the latest step) of every sequence."""
        in_step = frozenset(self._in_step)
        return [
            (each.request_id, each.num_prompt, len(each.tokens) - each.num_prompt, each.request_id in in_step)
            for each in self._sequences.values()
        ]


def _submit(sequence: _Sequence) -> Submit:
    return Submit(
        sequence.request_id, tuple(sequence.tokens), sequence.num_prompt, sequence.rules, sequence.priority,
        sequence.cache_salt, sequence.adapter, sequence.num_scored, sequence.num_likely, sequence.num_cached_tokens,
    )  # fmt: skip
