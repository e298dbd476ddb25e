"""From the logits of a step's rows to one token for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import NO_TOKEN_LEFT
from paceline.ops.api import Ops
from paceline.sample.edits import build_edits
from paceline.sample.grammar import build_grammar_mask
from paceline.sample.logprobs import NOT_FINITE, LogprobsForm, divide, formed_logprobs
from paceline.sample.state import SamplerState
from paceline.tensors import ChoiceControls, FloatArray, IntArray
from paceline.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Pick:
    """What one row came to: a token, with its log-probabilities if they were asked for, or an error and no token.

    ``likely`` tells whether the token's probability was above the threshold of an early stop; None if there is none.
    """

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    likely: bool | None = None


class Sampler:
    """Chooses tokens by the rules in ``state``. It never changes the state: a choice counts once it is committed."""

    def __init__(self, ops: Ops, state: SamplerState) -> None:
        self._ops = ops
        self._state = state

    def sample(self, logits: FloatArray, slots: Sequence[int], positions: Sequence[int]) -> list[Pick]:
        """Choose for logits [R, V], which are used up; ``positions`` are those that the chosen tokens will have.

        Raw log-probabilities are those of the logits as the model gave them, over the full width of the head, before
        every edit but the mask of a grammar: what it forbids is no alternative. A row on which nothing can be chosen
        has an error of its own and does not concern the others.
        """
        if not slots:
            return []
        forms = {row: form for row, slot in enumerate(slots) if (form := self._state.logprobs[slot]) is not None}
        raw_rows = [row for row, form in forms.items() if not form.processed]
        mask = build_grammar_mask([self._state.grammars[slot] for slot in slots], logits.shape[1])
        if mask is not None:
            self._ops.edit_logits(logits, mask)
        raw = logits[raw_rows] if raw_rows else logits[:0]
        edits = build_edits([self._state.edits[slot] for slot in slots], logits.shape[1], self._state.vocab_size)
        if edits is not None:
            self._ops.edit_logits(logits, edits)
        chosen = self._ops.choose(logits, self._controls(slots, positions))
        for row, slot in enumerate(slots):
            sequence = self._state.edits[slot]
            if sequence is not None and chosen[row] >= 0:
                chosen[row] = sequence.settle(int(chosen[row]))

        picks = [
            Pick(token) if token >= 0 else Pick(None, error=self._reason(logits[row], slots[row]))
            for row, token in enumerate(chosen.tolist())
        ]
        for row, is_likely in self._likely(logits, chosen, slots).items():
            picks[row] = replace(picks[row], likely=is_likely)
        processed_rows = [row for row, form in forms.items() if form.processed]
        for rows, source in ((raw_rows, raw), (processed_rows, logits[processed_rows] if processed_rows else raw)):
            for row, result in self._logprobs(source, chosen, rows, [forms[row] for row in rows]):
                picks[row] = Pick(None, error=NOT_FINITE) if result is None else replace(picks[row], logprobs=result)
        return picks

    def _likely(self, edited: FloatArray, chosen: IntArray, slots: Sequence[int]) -> dict[int, bool]:
        """Whether an early stop takes the chosen token for likely, for the rows that have chosen and have one."""
        state = self._state
        rows = [row for row, slot in enumerate(slots) if state.likely_above[slot] is not None and chosen[row] >= 0]
        if not rows:
            return {}
        logits = edited[rows]
        for row, values in zip(rows, logits, strict=True):
            if (temperature := state.temperature[slots[row]]) > 0:
                divide(values, temperature)
        logprobs = self._ops.top_logprobs(logits, chosen[rows], 0).chosen.tolist()
        bounds = [state.likely_above[slots[row]] for row in rows]
        return {
            row: bound is not None and math.exp(logprob) > bound
            for row, logprob, bound in zip(rows, logprobs, bounds, strict=True)
        }

    def _logprobs(
        self, source: FloatArray, chosen: IntArray, rows: list[int], forms: list[LogprobsForm]
    ) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """Row and log-probabilities, for those of ``rows`` that have chosen; ``source`` are their logits, used up."""
        scored = [i for i, row in enumerate(rows) if chosen[row] >= 0]
        if len(scored) < len(rows):
            source, rows, forms = source[scored], [rows[i] for i in scored], [forms[i] for i in scored]
        if rows:
            results = formed_logprobs(self._ops, source, chosen[rows], forms, self._state.vocab_size)
            yield from zip(rows, results, strict=True)

    def _controls(self, slots: Sequence[int], positions: Sequence[int]) -> ChoiceControls:
        state = self._state
        at: IntArray = np.array(slots, np.int32)
        return ChoiceControls(
            temperature=state.temperature[at],
            top_k=state.top_k[at],
            top_p=state.top_p[at],
            min_p=state.min_p[at],
            seeds=state.seeds[at],
            positions=np.array(positions, np.int32),
        )

    def _reason(self, edited: FloatArray, slot: int) -> str:
        """Why no token could be chosen from a row."""
        grammar = self._state.grammars[slot]
        if grammar is not None and grammar.error is not None:
            return grammar.error
        return NO_TOKEN_LEFT if np.all(np.isneginf(edited)) else NOT_FINITE
