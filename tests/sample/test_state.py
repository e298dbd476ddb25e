from __future__ import annotations

from typing import Any

import numpy as np

from paceline.sample.state import SamplerState
from paceline.sample.thinking import SequenceThinking
from paceline.types import LogprobsMode, ThinkingBudget, TokenRules

EVERYTHING = TokenRules(
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    frequency_penalty=0.75,
    presence_penalty=-0.5,
    seed=-2,
    min_tokens=3,
    eos_token_ids=(1,),
    stop_token_ids=(2,),
    bad_words=((3,), (4, 5)),
    logit_bias=((6, 1.0),),
    allowed_token_ids=(0, 6),
    thinking=ThinkingBudget(2, (1,), (7, 8), (9, 7, 8)),
    early_stop_window=3,
    early_stop_threshold=0.5,
    logprobs=4,
    logprobs_mode=LogprobsMode.PROCESSED_LOGITS,
    temp_scaled_logprobs=True,
    top_p_normalized_logprobs=True,
)


def fields_of(state: SamplerState, slot: int) -> dict[str, Any]:
    """Every per-slot field by name, whatever fields there are."""
    found = {name: values[slot] for name, values in vars(state).items() if name not in ("vocab_size", "_compiled")}
    edits = found.pop("edits")
    inner = {} if edits is None else {name: comparable(value) for name, value in vars(edits).items()}
    return {**found, **inner, "edited": edits is not None}


def comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "ids"):
        return value.ids.tolist(), value.counts.tolist()
    if isinstance(value, SequenceThinking):
        return vars(value)
    return value


def test_a_slot_shows_nothing_of_its_last_owner() -> None:
    for next_rules in (TokenRules(), TokenRules(logit_bias=((1, 2.0),)), EVERYTHING):
        used, fresh = SamplerState(2, 10), SamplerState(2, 10)
        used.start(1, EVERYTHING, [1, 2, 3], 1)
        used.commit(1, 4)
        for state in (used, fresh):
            state.start(1, next_rules, [5, 6], 1)
        assert fields_of(used, 1) == fields_of(fresh, 1)


def test_a_released_slot_is_as_it_was_at_first() -> None:
    used, fresh = SamplerState(2, 10), SamplerState(2, 10)
    used.start(0, EVERYTHING, [1, 2, 3], 1)
    used.release(0)
    used.release(0)
    assert fields_of(used, 0) == fields_of(fresh, 0)


def test_slots_do_not_touch_each_other() -> None:
    state = SamplerState(3, 10)
    state.start(1, EVERYTHING, [1, 2, 3], 1)
    before = fields_of(state, 1)
    state.start(0, TokenRules(repetition_penalty=2.0), [9], 1)
    state.commit(0, 8)
    state.release(2)
    assert fields_of(state, 1) == before


def test_all_64_bits_of_a_seed_are_kept() -> None:
    state = SamplerState(3, 10)
    for slot, seed in enumerate((-2, 2**64 - 1, 2**63)):
        state.start(slot, TokenRules(seed=seed), [], 0)
    assert state.seeds.tolist() == [2**64 - 2, 2**64 - 1, 2**63]


def test_a_huge_top_k_is_the_vocabulary() -> None:
    state = SamplerState(1, 10)
    state.start(0, TokenRules(top_k=2**62), [], 0)
    assert state.top_k.tolist() == [10]
