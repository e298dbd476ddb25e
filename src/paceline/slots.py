"""The running sequences as arrays indexed by slot.

A live sequence owns one slot, an integer the scheduler gave it. Nothing is ever compacted or swapped: the order of rows
in a step is an array of slots, never a move of data. Every field is written when a sequence starts, so that a slot
never shows its last owner's values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.tensors import IntArray
from paceline.types import SeqStart


class Slots:
    """S slots of sequences of at most L tokens, W = ceil(L / block_size) blocks each. The runner is the only writer.

    Attributes:
        tokens: [S, L] int32, prompt and output.
        block_tables: [S, W] int32, store blocks by position; -1 beyond ``num_blocks``.
        num_tokens, num_prompt, num_computed: [S]; see :class:`~paceline.types.SeqStart`. These and the following are
            looked at one by one, for which lists are faster.
        num_blocks: [S].
        adapters: [S], the name of each sequence's adapter; None is the model itself.
        prompt_logprobs: [S], likeliest tokens wanted for each prompt position; -1 is the vocabulary, None is off.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_tables: IntArray = np.full((max_num_seqs, -(-max_model_len // block_size)), -1, np.int32)
        self.num_tokens = [0] * max_num_seqs
        self.num_prompt = [0] * max_num_seqs
        self.num_computed = [0] * max_num_seqs
        self.num_blocks = [0] * max_num_seqs
        self.adapters: list[str | None] = [None] * max_num_seqs
        self.prompt_logprobs: list[int | None] = [None] * max_num_seqs

    def start(self, start: SeqStart) -> None:
        slot, count = start.slot, len(start.tokens)
        self.tokens[slot, :count] = start.tokens
        self.tokens[slot, count:] = 0
        self.num_tokens[slot] = count
        self.num_prompt[slot] = start.num_prompt
        self.num_computed[slot] = start.num_computed
        self.block_tables[slot] = -1
        self.num_blocks[slot] = 0
        self.adapters[slot] = start.adapter
        self.prompt_logprobs[slot] = start.rules.prompt_logprobs
        self.append_blocks(slot, start.blocks)

    def release(self, slot: int) -> None:
        self.num_tokens[slot] = 0
        self.num_computed[slot] = 0
        self.num_blocks[slot] = 0
        self.block_tables[slot] = -1

    def append_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        first = self.num_blocks[slot]
        self.block_tables[slot, first : first + len(blocks)] = blocks
        self.num_blocks[slot] += len(blocks)

    def append_token(self, slot: int, token: int) -> None:
        self.tokens[slot, self.num_tokens[slot]] = token
        self.num_tokens[slot] += 1
