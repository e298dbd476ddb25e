"""A thinking budget is a function of the tokens, however a sequence came to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.thinking import SequenceThinking
from paceline.types import ThinkingBudget, TokenRules
from support import sampling_oracle as oracle

START, END, LINE, EOS, WORD = 998, 999, 888, 2, 100
BARE = ThinkingBudget(5, (START,), (END,), (END,))
ON_LINES = ThinkingBudget(5, (START,), (END,), (LINE, END, LINE, LINE))
LONG = ThinkingBudget(5, (11, 12), (21, 22, 23), (21, 22, 23))


def after(budget: ThinkingBudget, output: list[int], prompt: list[int] | None = None) -> SequenceThinking:
    """The prompt leaves a block open, unless it is given."""
    prompt = [7, *budget.start] if prompt is None else prompt
    return SequenceThinking(budget, prompt + output, len(prompt))


def said(budget: ThinkingBudget, wanted: list[int], prompt: list[int] | None = None) -> list[int]:
    """The output of a model that would like to say ``wanted``."""
    output: list[int] = []
    thinking = after(budget, [], prompt)
    for token in wanted:
        forced = thinking.forced()
        output.append(thinking.settle(token, (EOS,)) if forced is None else forced)
        thinking.commit(output[-1])
    return output


# ---- cases: budget, number of tokens before, the next token, and what becomes of it


@pytest.mark.parametrize(
    ("limit", "before", "token", "becomes"),
    [(5, 5, 100, END), (8, 10, 200, END), (10, 5, 100, 100), (15, 8, 200, 200), (10, 3, END, END), (8, 4, END, END)],
)
def test_beyond_its_budget_a_thinking_ends(limit: int, before: int, token: int, becomes: int) -> None:
    thinking = after(replace(BARE, limit=limit), [WORD] * before)
    forced = thinking.forced()
    assert (thinking.settle(token, (EOS,)) if forced is None else forced) == becomes
    thinking.commit(becomes)
    if becomes == END:
        assert thinking.forced() is None
        assert thinking.settle(EOS, (EOS,)) == EOS


@pytest.mark.parametrize(
    ("said_before", "becomes"),
    [([], 100), ([WORD] * 4, 100), ([WORD] * 5, LINE), ([WORD] * 5 + [LINE], END), ([WORD] * 5 + [LINE, END], LINE),
     ([WORD] * 5 + [LINE, END, LINE], LINE), ([WORD] * 5 + [LINE, END, LINE, LINE], 100), ([WORD, END], 100),
     ([WORD, END, *[WORD] * 9], 100)],
)  # fmt: skip
def test_a_thinking_is_closed_with_line_breaks(said_before: list[int], becomes: int) -> None:
    forced = after(ON_LINES, said_before).forced()
    assert (100 if forced is None else forced) == becomes


def test_budgets_of_sequences_side_by_side_are_their_own() -> None:
    outputs = [[WORD] * n for n in (3, 5, 4, 100)]
    limits = [10, 5, 8, None]
    tokens = [100, 200, END, 300]
    results = []
    for output, limit, token in zip(outputs, limits, tokens, strict=True):
        forced = None if limit is None else after(replace(BARE, limit=limit), output).forced()
        results.append(token if forced is None else forced)
    assert results == [100, END, END, 300]


# ---- what a whole answer looks like


def test_an_end_of_sequence_while_thinking_becomes_the_end_of_the_thinking() -> None:
    assert said(BARE, [WORD, EOS, WORD, EOS]) == [WORD, END, WORD, EOS]
    assert said(ON_LINES, [WORD, EOS, WORD, EOS]) == [WORD, END, WORD, EOS]
    assert said(LONG, [EOS, EOS, EOS, EOS]) == [21, 22, 23, EOS]
    assert said(LONG, [21, 22, EOS, EOS]) == [21, 22, 23, EOS]
    assert said(LONG, [21, WORD, EOS, WORD]) == [21, WORD, 21, WORD]


def test_no_budget_ends_a_thinking_at_once() -> None:
    assert said(replace(BARE, limit=0), [WORD] * 3) == [END, WORD, WORD]
    assert said(replace(BARE, limit=0), [WORD, START, WORD, WORD], prompt=[7]) == [WORD, START, END, WORD]


def test_a_block_that_the_model_opens_is_counted_from_there() -> None:
    assert said(BARE, [WORD, START, *[WORD] * 7], prompt=[7]) == [WORD, START, *[WORD] * 5, END, WORD]
    assert said(LONG, [11, 12, *[WORD] * 9], prompt=[7]) == [11, 12, *[WORD] * 5, 21, 22, 23, WORD]


def test_an_opening_may_lie_across_the_end_of_the_prompt() -> None:
    assert said(LONG, [12, *[WORD] * 8], prompt=[7, 11]) == [12, *[WORD] * 5, 21, 22, 23]


def test_blocks_of_earlier_turns_do_not_count() -> None:
    for prompt in ([START, WORD, END, WORD], [START, END], [END, WORD]):
        assert said(BARE, [WORD] * 8, prompt=prompt) == [WORD] * 8
    assert said(BARE, [WORD] * 7, prompt=[START, WORD, END, WORD, START, WORD]) == [*[WORD] * 5, END, WORD]


def test_what_follows_the_thinking_is_free() -> None:
    answer = [END, START, *[WORD] * 9, EOS]
    assert said(BARE, answer) == answer
    assert said(BARE, [WORD, EOS], prompt=[7]) == [WORD, EOS]


def test_a_natural_end_at_the_very_limit_is_respected() -> None:
    assert said(ON_LINES, [*[WORD] * 4, END, WORD, WORD]) == [*[WORD] * 4, END, WORD, WORD]
    assert said(LONG, [WORD, WORD, 21, 22, 23, WORD]) == [WORD, WORD, 21, 22, 23, WORD]


# ---- against the oracle

few = st.integers(0, 5)
budgets = st.builds(
    ThinkingBudget,
    limit=st.integers(0, 6),
    start=st.lists(few, min_size=1, max_size=2).map(tuple),
    end=st.lists(few, min_size=1, max_size=3).map(tuple),
    close=st.lists(few, min_size=1, max_size=4).map(tuple),
)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(budget=budgets, prompt=st.lists(few, max_size=8), wanted=st.lists(few, max_size=20), cut=st.integers(0, 20))
def test_every_token_is_the_one_that_the_whole_of_the_tokens_asks_for(
    budget: ThinkingBudget, prompt: list[int], wanted: list[int], cut: int
) -> None:
    rules = TokenRules(eos_token_ids=(5,), thinking=budget)
    output: list[int] = []
    thinking = after(budget, [], prompt)
    for number, token in enumerate(wanted):
        if number == cut:  # preempted
            thinking = after(budget, output, prompt)
        forced = thinking.forced()
        assert forced == oracle.thinking_at(budget, prompt, output)[1]
        assert thinking.settle(token, (5,)) == oracle.settled(token, rules, prompt, output) or forced is not None
        output.append(thinking.settle(token, (5,)) if forced is None else forced)
        thinking.commit(output[-1])
