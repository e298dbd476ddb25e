"""From the logits of a step's rows to one token for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import NO_TOKEN_LEFT
from paceline.ops.api import Ops
from paceline.sample.edits import build_edits
from paceline.sample.grammar import build_grammar_mask
from paceline.sample.logprobs import NOT_FINITE, token_logprobs
from paceline.sample.state import SamplerState
from paceline.tensors import ChoiceControls, FloatArray, IntArray
from paceline.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Pick:
    """What one row came to: a token, with its log-probabilities if they were asked for, or an error and no token."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens by the rules in ``state``. It never changes the state: a choice counts once it is committed."""

    def __init__(self, ops: Ops, state: SamplerState) -> None:
        self._ops = ops
        self._state = state

    def sample(self, logits: FloatArray, slots: Sequence[int], positions: Sequence[int]) -> list[Pick]:
        """Choose for logits [R, V], which are used up; ``positions`` are those that the chosen tokens will have.

        Log-probabilities are raw: those of the logits as the model gave them, over the full width of the head, before
        every edit but the mask of a grammar: what it forbids is no alternative. A row on which nothing can be chosen
        has an error of its own and does not concern the others.
        """
        if not slots:
            return []
        logprobs = [self._state.logprobs[slot] for slot in slots]
        wanted = [row for row, k in enumerate(logprobs) if k is not None]
        mask = build_grammar_mask([self._state.grammars[slot] for slot in slots], logits.shape[1])
        if mask is not None:
            self._ops.edit_logits(logits, mask)
        raw = logits[wanted] if wanted else logits[:0]
        edits = build_edits([self._state.edits[slot] for slot in slots], logits.shape[1], self._state.vocab_size)
        if edits is not None:
            self._ops.edit_logits(logits, edits)
        chosen = self._ops.choose(logits, self._controls(slots, positions))

        picks = [
            Pick(token) if token >= 0 else Pick(None, error=self._reason(logits[row], slots[row]))
            for row, token in enumerate(chosen.tolist())
        ]
        if not wanted:
            return picks
        scored = [(i, row) for i, row in enumerate(wanted) if chosen[row] >= 0]
        for k in dict.fromkeys(logprobs[row] for _, row in scored):
            assert k is not None
            part = [(i, row) for i, row in scored if logprobs[row] == k]
            rows = [row for _, row in part]
            results = token_logprobs(self._ops, raw[[i for i, _ in part]], chosen[rows], k, self._state.vocab_size)
            for row, result in zip(rows, results, strict=True):
                picks[row] = Pick(None, error=NOT_FINITE) if result is None else Pick(int(chosen[row]), result)
        return picks

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
