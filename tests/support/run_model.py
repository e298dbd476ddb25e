"""Runs a model on one sequence without runner or scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.models.decoder import Decoder
from paceline.tensors import Array
from support.batches import Span, make_batch

BLOCK_SIZE = 16


class Sequencer:
    """One sequence with a store of its own, extended piece by piece."""

    def __init__(self, model: Decoder, max_tokens: int, adapter: str | None = None) -> None:
        self._adapter = adapter
        self._model = model
        self._table = range(-(-max_tokens // BLOCK_SIZE))
        self._kv = model.ops.make_kv(model.kv_layout, len(self._table), BLOCK_SIZE)
        self._length = 0

    def extend(self, token_ids: Sequence[int]) -> Array:
        """Logits after each of the tokens, [T, V]."""
        batch = make_batch([Span(self._table, self._length, len(token_ids), token_ids, self._adapter)], BLOCK_SIZE)
        self._length += len(token_ids)
        return self._model.logits(self._model.forward(batch, self._kv))


def model_logits(
    model: Decoder, token_ids: Sequence[int], cuts: Sequence[int] = (), adapter: str | None = None
) -> Array:
    """Logits of every position, [T, V], computed in pieces that are cut before the given positions."""
    sequencer = Sequencer(model, len(token_ids), adapter)
    pieces = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    return np.concatenate([sequencer.extend(piece) for piece in pieces])


def model_greedy(model: Decoder, prompt: Sequence[int], count: int, adapter: str | None = None) -> list[int]:
    """The likeliest continuation, one token at a time."""
    sequencer = Sequencer(model, len(prompt) + count, adapter)
    tokens: list[int] = []
    piece = prompt
    for _ in range(count):
        tokens.append(int(sequencer.extend(piece)[-1].argmax()))
        piece = tokens[-1:]
    return tokens
