"""The sampler over the reference operations: rules in, picks out, and no row knows of another."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from paceline.errors import NO_TOKEN_LEFT
from paceline.ops.reference import ReferenceOps
from paceline.sample.logprobs import LOWEST
from paceline.sample.sampler import Pick, Sampler
from paceline.sample.state import SamplerState
from paceline.tensors import FloatArray
from paceline.types import LogprobsMode, ThinkingBudget, TokenRules
from support import sampling_oracle as oracle

VOCAB = 60
WIDTH = 64
GREEDY = TokenRules(temperature=0.0)


def make(max_num_seqs: int = 4, vocab_size: int = VOCAB) -> tuple[SamplerState, Sampler]:
    state = SamplerState(max_num_seqs, vocab_size)
    return state, Sampler(ReferenceOps(), state)


def pick_alone(
    rules: TokenRules,
    logits: list[float],
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    position: int = 0,
    vocab_size: int | None = None,
) -> Pick:
    state, sampler = make(1, len(logits) if vocab_size is None else vocab_size)
    prompt, output = prompt or [], output or []
    state.start(0, rules, prompt + output, len(prompt))
    [pick] = sampler.sample(np.array([logits], np.float32), [0], [position])
    return pick


def random_rules(rng: random.Random) -> TokenRules:
    def some(values: list[float], off: float) -> float:
        return rng.choice([off, *values])

    return TokenRules(
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 10]),
        top_p=some([0.0, 0.5, 0.95], 1.0),
        min_p=some([0.02, 0.2], 0.0),
        repetition_penalty=some([0.8, 1.3], 1.0),
        frequency_penalty=some([-0.5, 0.5], 0.0),
        presence_penalty=some([-0.5, 0.5], 0.0),
        seed=rng.getrandbits(64),
        min_tokens=rng.choice([0, 0, 6]),
        eos_token_ids=(2,),
        stop_token_ids=rng.choice([(), (5, 6)]),
        bad_words=rng.choice([(), ((7,), (8, 9), (1, 8, 10))]),
        logit_bias=rng.choice([(), ((3, 4.0), (4, -100.0))]),
        allowed_token_ids=rng.choice([None, None, tuple(range(0, VOCAB, 2))]),
        thinking=rng.choice([None, None, ThinkingBudget(rng.randrange(6), (11,), (12, 13), (14, 12, 13))]),
        early_stop_window=rng.choice([0, 4]),
        early_stop_threshold=rng.choice([0.02, 0.1, 0.5]),
        logprobs=rng.choice([None, 0, 3, -1]),
        logprobs_mode=rng.choice(list(LogprobsMode)),
        temp_scaled_logprobs=rng.random() < 0.5,
        top_p_normalized_logprobs=rng.random() < 0.5,
    )


def random_tokens(rng: random.Random, rules: TokenRules) -> tuple[list[int], list[int]]:
    """Prompt and output of a sequence with these rules."""
    prompt, output = [[rng.randrange(VOCAB) for _ in range(rng.randrange(12))] for _ in range(2)]
    if rng.random() < 0.5:
        prompt.append(11)  # opens the thinking
    return prompt, oracle.as_thinking_allows(rules, prompt, output)


def random_logits(rng: np.random.Generator, count: int) -> FloatArray:
    return rng.normal(0, 2, (count, WIDTH)).astype(np.float32)


# ---- one row


def test_the_order_of_edits_and_filters_is_that_of_the_definition() -> None:
    rng, numbers = random.Random(4), np.random.default_rng(4)
    compared = forced = likely = 0
    for trial in range(600):
        rules = random_rules(rng)
        prompt, output = random_tokens(rng, rules)
        logits = random_logits(numbers, 1)[0].tolist()
        pick = pick_alone(rules, logits, prompt, output, position=trial, vocab_size=VOCAB)
        edited = oracle.edited_logits(logits, rules, prompt, output, VOCAB)
        if rules.temperature == 0:
            ranked = sorted(range(WIDTH), key=lambda i: (-edited[i], i))
            value = dict(enumerate(edited))
        else:
            kept = oracle.kept_tokens(edited, rules.temperature, rules.top_k, rules.top_p, rules.min_p)
            value = oracle.scores(edited, list(kept), rules.temperature, rules.seed, trial)
            ranked = sorted(value, key=lambda i: (-value[i], i))
        if len(ranked) > 1 and value[ranked[0]] - value[ranked[1]] < 1e-4:
            continue  # too close for float32 to be sure
        assert pick.token == oracle.settled(ranked[0], rules, prompt, output)
        probability = oracle.probability(edited, pick.token, rules.temperature)
        if not rules.early_stop_window:
            assert pick.likely is None
        elif abs(probability - rules.early_stop_threshold) > 1e-6:
            assert pick.likely is (probability > rules.early_stop_threshold)
            likely += pick.likely
        forced += edited.count(-math.inf) == WIDTH - 1
        compared += 1
    assert compared > 560
    assert forced > 20
    assert likely > 50


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3),
        TokenRules(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias=((0, 1.0),), min_tokens=9,
                   eos_token_ids=(4,), bad_words=((3, 5),)),
        TokenRules(temperature=0.6),
        TokenRules(temperature=1.4, top_k=4),
        TokenRules(top_p=0.7),
        TokenRules(temperature=1.2, min_p=0.3),
        TokenRules(repetition_penalty=0.7),
        TokenRules(frequency_penalty=-0.5),
        TokenRules(presence_penalty=1.0),
        TokenRules(logit_bias=((7, 3.0), (4, -2.0))),
        TokenRules(allowed_token_ids=(1, 2, 7)),
        TokenRules(bad_words=((4,), (3, 2), (0, 3, 5), (3, 3, 6))),
        TokenRules(min_tokens=5, eos_token_ids=(4, 2), stop_token_ids=(5,)),
        TokenRules(thinking=ThinkingBudget(9, (6,), (3, 1), (3, 1)), eos_token_ids=(4,)),
    ],
    ids=["penalties", "mixed", "temperature", "top-k", "top-p", "min-p", "repetition", "frequency", "presence", "bias",
         "allowed", "bad words", "min tokens", "thinking"],
)  # fmt: skip
def test_tokens_follow_their_probabilities_after_the_edits(rules: TokenRules) -> None:
    logits, prompt, output, count = [1.0, -0.5, 1.5, 0.0, 2.0, 1.0, 0.7, -1.0], [2, 6], [0, 3, 0, 3], 6000
    edited = oracle.edited_logits(logits, rules, prompt, output, 8)
    kept = oracle.kept_tokens(edited, rules.temperature, rules.top_k, rules.top_p, rules.min_p)
    state, sampler = make(1, 8)
    state.start(0, rules, prompt + output, len(prompt))
    copies = np.tile(np.array(logits, np.float32), (count, 1))
    tokens = [pick.token for pick in sampler.sample(copies, [0] * count, range(count))]
    expected: dict[int, float] = {}
    for token, probability in kept.items():
        settled = oracle.settled(token, rules, prompt, output)
        expected[settled] = expected.get(settled, 0.0) + probability
    assert set(tokens) <= set(expected)
    observed = [tokens.count(token) for token in expected]
    assert stats.chisquare(observed, [p * count for p in expected.values()]).pvalue > 1e-4


def test_exactly_min_tokens_are_forced_before_an_end_token() -> None:
    state, sampler = make(1, 4)
    state.start(0, replace(GREEDY, min_tokens=3, eos_token_ids=(1,), stop_token_ids=(2,)), [0, 0], 2)
    tokens = []
    for position in range(5):
        [pick] = sampler.sample(np.array([[1, 9, 8, 0]], np.float32), [0], [position])
        assert pick.token is not None
        tokens.append(pick.token)
        state.commit(0, pick.token)
    assert tokens == [0, 0, 0, 1, 1]


def test_a_bad_word_is_never_completed() -> None:
    state, sampler = make(1, 4)
    state.start(0, replace(GREEDY, bad_words=((3, 2),)), [3], 1)
    tokens = []
    for position in range(4):
        logits = [[0, 1, 8, 9]] if position % 2 == 0 else [[0, 7, 8, 1]]
        [pick] = sampler.sample(np.array(logits, np.float32), [0], [position])
        assert pick.token is not None
        tokens.append(pick.token)
        state.commit(0, pick.token)
    assert tokens == [3, 1, 3, 1]


def test_ids_beyond_the_tokenizer_are_never_picked() -> None:
    assert pick_alone(GREEDY, [0, 1, 2, 50, math.nan, math.inf], vocab_size=3).token == 2
    rules = TokenRules(temperature=2.0, logit_bias=((4, 100.0),), allowed_token_ids=(0, 1, 2, 3, 4))
    assert {pick_alone(rules, [0, 1, 2, 50, 60], position=p, vocab_size=3).token for p in range(50)} <= {0, 1, 2}


def test_an_extreme_repetition_penalty_keeps_ordinary_rows_finite() -> None:
    for penalty in (1e-300, 1e300):
        pick = pick_alone(replace(GREEDY, repetition_penalty=penalty), [-1, 0, 0.5], prompt=[0, 1])
        assert pick.error is None


# ---- errors


@pytest.mark.parametrize("rules", [GREEDY, TokenRules(top_p=0.5)], ids=["greedy", "sampled"])
def test_a_row_that_is_not_finite_says_so(rules: TokenRules) -> None:
    for bad in (math.nan, math.inf):
        assert pick_alone(rules, [0, bad, 1]) == Pick(None, error="the logits are not finite")


def test_a_row_with_nothing_left_says_so() -> None:
    rules = replace(GREEDY, allowed_token_ids=(1,), min_tokens=1, eos_token_ids=(1,), logprobs=2)
    assert pick_alone(rules, [0, 1, 2]) == Pick(None, error=NO_TOKEN_LEFT)


def test_a_bad_row_does_not_concern_the_others() -> None:
    state, sampler = make()
    for slot in range(3):
        state.start(slot, replace(GREEDY, logprobs=1), [0], 1)
    logits = np.zeros((3, WIDTH), np.float32)
    logits[:, 7] = 5
    logits[1, 3] = math.nan
    first, second, third = sampler.sample(logits, [0, 1, 2], [1, 1, 1])
    assert second == Pick(None, error="the logits are not finite")
    assert first == third
    assert first.token == 7
    assert first.logprobs is not None


# ---- log-probabilities


def test_logprobs_are_those_of_the_logits_before_every_edit() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    rules = replace(GREEDY, logprobs=2, logit_bias=((0, 50.0), (3, -50.0)), allowed_token_ids=(0,), bad_words=((3,),),
                    repetition_penalty=2.0)  # fmt: skip
    pick = pick_alone(rules, logits, prompt=[0, 1, 2])
    total = math.log(sum(map(math.exp, logits)))
    assert pick.token == 0
    assert pick.logprobs is not None
    assert pick.logprobs.token_id == 0
    assert pick.logprobs.rank == 4
    assert pick.logprobs.logprob == pytest.approx(0 - total)
    assert pick.logprobs.top_ids == (3, 2)
    assert pick.logprobs.top_logprobs == pytest.approx((3 - total, 2 - total))


def test_logprobs_of_every_form_are_those_of_the_definition() -> None:
    rng, numbers = random.Random(14), np.random.default_rng(14)
    forms = set()
    for trial in range(400):
        rules = replace(random_rules(rng), logprobs=rng.choice([0, 3, -1]))
        prompt, output = random_tokens(rng, rules)
        logits = random_logits(numbers, 1)[0].tolist()
        pick = pick_alone(rules, logits, prompt, output, position=trial, vocab_size=VOCAB)
        found = pick.logprobs
        assert found is not None
        expected = oracle.logprobs_of(logits, rules, prompt, output, VOCAB)
        assert found.token_id == pick.token
        assert found.logprob == pytest.approx(max(expected[found.token_id], LOWEST), abs=2e-5)
        assert found.top_logprobs == pytest.approx([max(expected[i], LOWEST) for i in found.top_ids], abs=2e-5)
        # Order and rank are those of the whole distribution, whatever top-p leaves of it.
        whole = oracle.logprobs_of(logits, replace(rules, top_p=1.0), prompt, output, VOCAB)
        ranked = sorted(range(VOCAB), key=lambda i: (-whole[i], i))
        assert list(found.top_ids) == ranked[: VOCAB if rules.logprobs == -1 else rules.logprobs]
        assert found.rank == sum(value >= whole[found.token_id] for value in whole[:VOCAB])
        forms.add(
            (rules.logprobs_mode, rules.temp_scaled_logprobs, rules.top_p_normalized_logprobs and rules.top_p < 1)
        )
    assert len(forms) == 16


def test_a_top_p_set_of_thousands_of_tokens_is_found_whole() -> None:
    logits = np.zeros((1, 5000), np.float32)
    rules = TokenRules(top_p=0.9, top_p_normalized_logprobs=True, logprobs=-1, seed=3)
    state, sampler = make(1, 5000)
    state.start(0, rules, [0], 1)
    [pick] = sampler.sample(logits, [0], [1])
    assert pick.logprobs is not None
    values = pick.logprobs.top_logprobs
    kept = sum(value > LOWEST for value in values)
    assert kept == pytest.approx(4500, abs=2)
    assert values[0] == pytest.approx(-math.log(kept), abs=1e-4)
    assert all(value in (values[0], LOWEST) for value in values)


def test_top_p_of_zero_leaves_the_whole_probability_to_the_best_token() -> None:
    rules = TokenRules(top_p=0.0, top_p_normalized_logprobs=True, logprobs=3)
    found = pick_alone(rules, [0.3, 2.7, 1.1, 2.7]).logprobs
    assert found is not None
    assert (found.token_id, found.rank) == (1, 2)
    assert found.logprob == pytest.approx(0.0, abs=1e-12)
    assert found.top_logprobs == pytest.approx((0.0, LOWEST, LOWEST), abs=1e-12)


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    state, sampler = make(6)
    wanted = [None, 0, 3, -1, 10_000, 3]
    for slot, k in enumerate(wanted):
        state.start(slot, replace(GREEDY, logprobs=k), [0], 1)
    logits = np.tile(random_logits(np.random.default_rng(1), 1), (6, 1))
    picks = sampler.sample(logits, range(6), [1] * 6)
    assert picks[0].logprobs is None
    lists = [pick.logprobs.top_ids for pick in picks[1:] if pick.logprobs is not None]
    assert [len(ids) for ids in lists] == [0, 3, VOCAB, VOCAB, 3]
    assert sorted(lists[2]) == list(range(VOCAB))
    assert lists[1] == lists[4] == lists[2][:3]


# ---- independence


def test_a_pick_has_the_same_bits_in_any_company_and_order() -> None:
    rng, numbers = random.Random(9), np.random.default_rng(9)
    for _ in range(30):
        state, sampler = make(8)
        for slot in range(8):
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            state.start(slot, random_rules(rng), tokens, rng.randrange(1, len(tokens) + 1))
        logits = random_logits(numbers, 8)
        positions = [rng.randrange(500) for _ in range(8)]
        alone = [sampler.sample(logits[s : s + 1].copy(), [s], [positions[s]])[0] for s in range(8)]
        order = rng.sample(range(8), 8)
        poisoned = logits[order]
        for row in rng.sample(range(8), 2):
            poisoned[row] = math.nan
        together = sampler.sample(poisoned.copy(), order, [positions[s] for s in order])
        for row, slot in enumerate(order):
            if not np.isnan(poisoned[row, 0]):
                assert together[row] == alone[slot]


def test_sampling_does_not_change_the_state() -> None:
    state, sampler = make(1)
    state.start(0, replace(random_rules(random.Random(2)), temperature=1.0), [1, 2, 3], 2)
    logits = random_logits(np.random.default_rng(2), 1)
    assert sampler.sample(logits.copy(), [0], [3]) == sampler.sample(logits.copy(), [0], [3])


def test_a_sequence_goes_on_after_a_restart_as_if_nothing_had_happened() -> None:
    rng, numbers = random.Random(6), np.random.default_rng(6)
    for _ in range(20):
        rules, steps = random_rules(rng), random_logits(numbers, 12)
        prompt = [rng.randrange(VOCAB) for _ in range(5)]
        state, sampler = make(2)
        state.start(0, rules, prompt, 5)
        undisturbed = []
        for i in range(12):
            [pick] = sampler.sample(steps[i : i + 1].copy(), [0], [5 + i])
            undisturbed.append(pick)
            assert pick.token is not None
            state.commit(0, pick.token)

        tokens, picks = list(prompt), []
        for i in range(12):
            if i % 4 == 0:  # preempted: another slot, which someone else has used
                state.start(1, random_rules(rng), [1, 1, 1], 1)
                state.release(1)
                state.start(1, rules, tokens, 5)
            [pick] = sampler.sample(steps[i : i + 1].copy(), [1], [5 + i])
            picks.append(pick)
            assert pick.token is not None
            tokens.append(pick.token)
            state.commit(1, pick.token)
        assert picks == undisturbed


def test_no_rows_give_no_picks() -> None:
    _, sampler = make()
    assert sampler.sample(np.zeros((0, WIDTH), np.float32), [], []) == []
