"""A sequence's edits are a function of its rules and committed tokens, however it came to them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ops.reference_sampling import edit_logits
from paceline.sample.edits import SequenceEdits, build_edits, changes_logits
from paceline.tensors import LogitEdits
from paceline.types import ThinkingBudget, TokenRules
from support import sampling_oracle as oracle

VOCAB = 12
WIDTH = 15

ids = st.integers(0, WIDTH + 3)
"""Some at or beyond the vocabulary, and beyond the head."""

rules_of_any_kind = st.builds(
    TokenRules,
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.25]),
    min_tokens=st.integers(0, 5),
    eos_token_ids=st.lists(ids, max_size=2).map(tuple),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=4).map(lambda d: tuple(d.items())),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1).map(tuple),
    thinking=st.none() | st.just(ThinkingBudget(2, (3,), (4, 5), (1, 4, 5))),
)
known_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def gather(sequences: list[SequenceEdits | None], width: int = WIDTH) -> LogitEdits:
    edits = build_edits(sequences, width, VOCAB)
    assert edits is not None
    return edits


def sequence(rules: TokenRules, prompt: list[int], output: list[int]) -> SequenceEdits | None:
    return SequenceEdits(rules, prompt + output, len(prompt), VOCAB) if changes_logits(rules) else None


@settings(max_examples=200, derandomize=True, deadline=None)
@given(rules=rules_of_any_kind, prompt=known_tokens, output=known_tokens, cut=st.integers(0, 12))
def test_edits_after_a_restart_equal_those_built_along_the_way(
    rules: TokenRules, prompt: list[int], output: list[int], cut: int
) -> None:
    output = oracle.as_thinking_allows(rules, prompt, output)
    along, restarted = sequence(rules, prompt, output[:cut]), sequence(rules, prompt, output)
    if along is not None:
        for token in output[cut:]:
            along.commit(token)
    one, other = gather([along]), gather([restarted])
    for field in fields(LogitEdits):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


@settings(max_examples=200, derandomize=True, deadline=None)
@given(requests=st.lists(st.tuples(rules_of_any_kind, known_tokens, known_tokens), min_size=1, max_size=4))
def test_gathered_edits_do_to_each_row_what_its_rules_say(
    requests: list[tuple[TokenRules, list[int], list[int]]],
) -> None:
    # Exact in float32 and float64 alike: small multiples of 1/16, and penalties that are powers of two.
    logits = np.random.default_rng(len(requests)).integers(-64, 64, (len(requests), WIDTH)) / 16
    edited = logits.astype(np.float32)
    allowed = [(rules, prompt, oracle.as_thinking_allows(rules, prompt, output)) for rules, prompt, output in requests]
    edit_logits(edited, gather([sequence(*request) for request in allowed]))
    for row, (rules, prompt, output) in enumerate(allowed):
        assert edited[row].tolist() == oracle.edited_logits(logits[row].tolist(), rules, prompt, output, VOCAB)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(rules=rules_of_any_kind, prompt=known_tokens, output=known_tokens)
def test_lists_name_each_id_once_and_within_the_vocabulary(
    rules: TokenRules, prompt: list[int], output: list[int]
) -> None:
    edits = gather([sequence(rules, prompt, output)])
    for listed in (edits.bias_ids, edits.seen_ids, edits.banned_ids):
        assert listed.dtype == np.int32
        assert len(set(listed.tolist())) == len(listed)
        assert all(0 <= token < VOCAB for token in listed.tolist())


def test_rules_that_leave_the_logits_alone_build_nothing() -> None:
    rules = TokenRules(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, logprobs=4, eos_token_ids=(2,))
    assert not changes_logits(rules)
    assert build_edits([None, None], VOCAB, VOCAB) is None
    edits = gather([None, None])  # the head is wider than the vocabulary
    for name in ("allowed_rows", "allowed_bits", "bias_ids", "bias_values", "seen_ids", "seen_counts", "banned_ids"):
        assert getattr(edits, name).size == 0
    assert edits.bias_starts.tolist() == edits.seen_starts.tolist() == edits.banned_starts.tolist() == [0, 0, 0]


def test_the_prompt_is_listed_for_the_repetition_penalty_alone() -> None:
    prompt, output = [4, 5], [5, 6]
    for rules, listed in (
        (TokenRules(repetition_penalty=1.5), {4: 0, 5: 1, 6: 1}),
        (TokenRules(frequency_penalty=0.5), {5: 1, 6: 1}),
    ):
        edits = gather([sequence(rules, prompt, output)])
        assert dict(zip(edits.seen_ids.tolist(), edits.seen_counts.tolist(), strict=True)) == listed


def banned(rules: TokenRules, output: list[int], prompt: list[int] | None = None) -> list[int]:
    edits = sequence(rules, prompt or [], output)
    assert edits is not None
    return edits.banned().tolist()


def test_end_tokens_are_banned_until_min_tokens_are_there() -> None:
    rules = TokenRules(min_tokens=2, eos_token_ids=(1,), stop_token_ids=(7, 3, 1))
    assert banned(rules, []) == [1, 3, 7]
    assert banned(rules, [5]) == [1, 3, 7]
    assert banned(rules, [5, 5]) == []
    assert banned(rules, [], prompt=[5, 5, 5]) == [1, 3, 7]


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    assert banned(TokenRules(bad_words=((4,), (2,), (4,))), [4]) == [2, 4]


def test_a_longer_bad_word_is_banned_at_its_last_token_only() -> None:
    rules = TokenRules(bad_words=((1, 2, 3), (2, 3), (9, 2, 4)))
    assert banned(rules, []) == []
    assert banned(rules, [1]) == []
    assert banned(rules, [2]) == [3]
    assert banned(rules, [1, 2]) == [3]
    assert banned(rules, [9, 2]) == [3, 4]
    assert banned(rules, [9, 2, 5]) == []


def test_a_bad_words_beginning_in_the_prompt_does_not_count() -> None:
    rules = TokenRules(bad_words=((1, 2, 3),))
    assert banned(rules, [], prompt=[1, 2]) == []
    assert banned(rules, [2], prompt=[1]) == []


def test_a_bad_word_that_repeats_a_token_matches_its_own_tail() -> None:
    rules = TokenRules(bad_words=((5, 5, 5),))
    assert banned(rules, [5]) == []
    assert banned(rules, [5, 5]) == [5]
    assert banned(rules, [5, 5, 6, 5]) == []
