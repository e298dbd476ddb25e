from __future__ import annotations

import numpy as np

from paceline.runner.batch import build_batch, prompt_rows
from paceline.slots import Slots
from paceline.types import SeqSpan, SeqStart, TokenRules


def make_slots(*lengths: int, block_size: int = 4, prompt_logprobs: int | None = None) -> Slots:
    """Slot i holds a prompt 100 i, 100 i + 1, ... in blocks 10 i, 10 i + 1, ..."""
    slots = Slots(len(lengths), 32, block_size)
    for slot, length in enumerate(lengths):
        tokens = tuple(range(100 * slot, 100 * slot + length))
        blocks = tuple(range(10 * slot, 10 * slot + -(-length // block_size)))
        rules = TokenRules(prompt_logprobs=prompt_logprobs)
        slots.start(SeqStart(slot, tokens, length, 0, blocks, rules))
    return slots


def test_spans_are_packed_in_the_order_of_the_plan() -> None:
    slots = make_slots(8, 7, 8)
    batch = build_batch([SeqSpan(2, 0, 4), SeqSpan(0, 0, 3), SeqSpan(1, 1, 6)], slots)
    assert batch.token_ids.tolist() == [200, 201, 202, 203, 0, 1, 2, 101, 102, 103, 104, 105, 106]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 1, 2, 3, 4, 5, 6]
    assert batch.span_starts.tolist() == [0, 4, 7, 13]
    assert batch.context_lens.tolist() == [0, 0, 1]


def test_the_rows_of_each_adapter_are_told() -> None:
    slots = Slots(4, 32, 4)
    for slot, adapter in enumerate(["b", None, "a", "b"]):
        slots.start(SeqStart(slot, tuple(range(8)), 8, 0, (2 * slot, 2 * slot + 1), TokenRules(), adapter))
    batch = build_batch([SeqSpan(3, 0, 2), SeqSpan(1, 0, 3), SeqSpan(0, 4, 1), SeqSpan(2, 0, 2)], slots)
    assert [(used.name, used.rows.tolist(), used.rows.dtype) for used in batch.adapters] == [
        ("b", [0, 1, 5], np.int32),
        ("a", [6, 7], np.int32),
    ]
    assert build_batch([SeqSpan(1, 0, 3)], slots).adapters == ()
    slots.release(3)
    slots.start(SeqStart(3, (1, 2), 2, 0, (0,), TokenRules()))
    assert build_batch([SeqSpan(3, 0, 2)], slots).adapters == ()


def test_each_token_goes_to_its_row_of_the_store() -> None:
    slots = make_slots(8, 7)
    batch = build_batch([SeqSpan(1, 2, 4)], slots)
    assert batch.kv_rows.tolist() == [10 * 4 + 2, 10 * 4 + 3, 11 * 4 + 0, 11 * 4 + 1]
    assert batch.block_tables.tolist() == [[10, 11]]


def test_a_shorter_sequence_has_unused_table_entries_of_minus_one() -> None:
    slots = make_slots(3, 9)
    batch = build_batch([SeqSpan(0, 0, 3), SeqSpan(1, 0, 9)], slots)
    assert batch.block_tables.tolist() == [[0, -1, -1], [10, 11, 12]]


def test_only_spans_that_sample_have_a_logit_row() -> None:
    slots = make_slots(8, 7, 5)
    batch = build_batch([SeqSpan(0, 0, 4, sample=False), SeqSpan(1, 0, 7), SeqSpan(2, 4, 1)], slots)
    assert batch.logit_rows.tolist() == [10, 11]


def test_blocks_given_with_a_span_are_used_by_it() -> None:
    slots = make_slots(4)
    slots.append_token(0, 7)
    slots.append_blocks(0, (25,))
    batch = build_batch([SeqSpan(0, 4, 1, (25,))], slots)
    assert batch.token_ids.tolist() == [7]
    assert batch.kv_rows.tolist() == [100]


def test_a_slot_never_shows_its_last_owner() -> None:
    slots = make_slots(9)
    slots.start(SeqStart(0, (5, 6), 2, 0, (3,), TokenRules()))
    assert slots.tokens[0].tolist() == [5, 6] + [0] * 30
    assert slots.block_tables[0].tolist() == [3] + [-1] * 7
    assert slots.prompt_logprobs[0] is None


def test_prompt_rows_score_the_following_prompt_token_in_every_chunk() -> None:
    slots = make_slots(6, prompt_logprobs=2)
    scored = []
    for span in (SeqSpan(0, 0, 2, sample=False), SeqSpan(0, 2, 3, sample=False), SeqSpan(0, 5, 1)):
        batch = build_batch([span], slots)
        for wanted in prompt_rows([span], slots, batch):
            positions = batch.positions[wanted.rows]
            scored += list(zip(positions.tolist(), wanted.targets.tolist(), strict=True))
            assert wanted.k == 2
    assert scored == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_output_tokens_are_not_scored_after_a_preemption() -> None:
    slots = Slots(1, 16, 4)
    slots.start(SeqStart(0, (1, 2, 3, 4, 5), 3, 0, (0, 1), TokenRules(prompt_logprobs=0)))
    batch = build_batch([SeqSpan(0, 0, 5)], slots)
    (wanted,) = prompt_rows([SeqSpan(0, 0, 5)], slots, batch)
    assert wanted.targets.tolist() == [2, 3]


def test_all_arrays_are_int32() -> None:
    batch = build_batch([SeqSpan(0, 0, 3)], make_slots(3))
    for name in set(batch.__slots__) - {"adapters"}:
        assert getattr(batch, name).dtype == np.int32, name
