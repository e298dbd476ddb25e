"""The choice of tokens, for every implementation of the operations: against an oracle, by statistics, by equal bits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from paceline.ops.api import Ops
from paceline.ops.noise import gumbel
from paceline.tensors import FloatArray
from paceline.types import TokenRules
from support import sampling_oracle as oracle
from support.choosing import controls, edits, rows, take_controls
from support.implementations import Implementation, implementations

INF = math.inf
SIGNIFICANCE = 1e-4
"""Seeds are fixed, so a test that passes once passes always; this bounds how unlucky a sound sampler may be."""

DRAWS = 6000


@pytest.fixture(params=implementations(), ids=lambda implementation: implementation.name)
def ops(request: pytest.FixtureRequest) -> Ops:
    implementation: Implementation = request.param
    return implementation.make(1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def draw(ops: Ops, logits: list[float], count: int = DRAWS, **how: float) -> list[int]:
    """Tokens chosen from one row's logits at ``count`` positions."""
    copies = np.tile(np.array(logits, np.float32), (count, 1))
    return ops.choose(copies, controls(count, seeds=5, positions=range(count), **how)).tolist()


# ---- choose: greedy


def test_greedy_takes_the_largest_logit_and_the_smaller_id_among_equals(ops: Ops) -> None:
    logits = rows([1, 3, 2, 3], [-5, -5, -5, -5], [-INF, -1, -INF, -2], [-3e38, 3e38, 0, 3e38])
    assert ops.choose(logits, controls(4, temperature=0)).tolist() == [1, 0, 1, 1]


def test_the_smaller_id_wins_far_apart_in_a_wide_row(ops: Ops) -> None:
    logits = np.zeros((1, 50_001), np.float32)
    logits[0, [50_000, 31_337, 17]] = 4.5
    assert ops.choose(logits, controls(1, temperature=0)).tolist() == [17]


def test_greedy_rows_ignore_filters_seed_and_position(ops: Ops) -> None:
    logits = rows([0, 1, 0.5], [0, 1, 0.5])
    how = controls(2, temperature=0, top_k=2, top_p=0.1, min_p=0.9, seeds=[1, 2], positions=[3, 4])
    assert ops.choose(logits, how).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[0, math.nan, 1], [0, INF, 1], [INF, -INF, math.nan], [-INF, -INF, -INF]])
def test_a_row_with_nothing_to_choose_from_gives_minus_one(ops: Ops, temperature: float, broken: list[float]) -> None:
    logits = rows([0, 0, 9], broken, [9, 0, 0])
    assert ops.choose(logits, controls(3, temperature=temperature, top_k=1)).tolist() == [2, -1, 0]


def test_no_rows_give_no_tokens(ops: Ops) -> None:
    assert ops.choose(np.zeros((0, 5), np.float32), controls(0)).shape == (0,)


def test_choosing_leaves_the_logits_as_they_are(ops: Ops, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((4, 99), np.float32)
    before = logits.copy()
    ops.choose(logits, controls(4, top_k=5, top_p=0.9, min_p=0.01))
    assert np.array_equal(logits, before)


# ---- choose: the very token


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33, 1000, 5003])
def test_the_token_is_the_one_that_the_definition_gives(ops: Ops, rng: np.random.Generator, width: int) -> None:
    count = 150 if width < 100 else 25
    compared = 0
    for trial in range(count):
        logits = rng.normal(0, rng.choice([0.05, 1, 6]), (1, width)).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits * 4) / np.float32(4)  # many equal logits, exact differences
        temperature = float(rng.choice([0.25, 0.5, 1, 2]))
        top_k = int(rng.choice([0, 0, 1, 3, width, width + 9]))
        top_p = float(np.float32(rng.choice([1, 1, 0, 0.3, 0.9, 0.999])))
        min_p = float(np.float32(rng.choice([0, 0, 0.02, 0.5, 1])))
        seed, position = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**31))
        kept = oracle.kept_tokens(logits[0].tolist(), temperature, top_k, top_p, min_p)
        scores = oracle.scores(logits[0].tolist(), list(kept), temperature, seed, position)
        ranking = sorted(scores, key=lambda token: (-scores[token], token))
        if len(ranking) > 1 and scores[ranking[0]] - scores[ranking[1]] < 1e-4:
            continue  # too close for float32 to be sure
        how = controls(
            1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seed, positions=position
        )
        assert ops.choose(logits, how).tolist() == ranking[:1]
        compared += 1
    assert compared > 0.9 * count


def test_equal_logits_are_decided_by_the_noise_alone(ops: Ops) -> None:
    chosen = ops.choose(np.full((50, 4099), -7.25, np.float32), controls(50, seeds=3, positions=range(50)))
    assert chosen.tolist() == [int(gumbel(3, p, np.arange(4099)).argmax()) for p in range(50)]


def test_seed_and_position_decide_and_nothing_else(ops: Ops) -> None:
    logits = np.zeros((6, 1000), np.float32)
    a, b, c, d, e, f = ops.choose(
        logits, controls(6, seeds=[1, 1, 2, 2**64 - 1, 1, 2**63], positions=[1, 1, 1, 1, 2, 1])
    ).tolist()
    assert a == b
    assert len({a, c, d, e, f}) == 5


# ---- choose: distributions


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.999},
    ],
    ids=str,
)
def test_tokens_follow_their_probabilities(ops: Ops, how: dict[str, float]) -> None:
    logits = [1.0, -0.5, 2.0, 0.0, 0.3, 1.9, -2.0, 0.9, 1.2, -INF]
    kept = oracle.kept_tokens(logits, **how)
    tokens = draw(ops, logits, **how)
    assert set(tokens) <= set(kept)
    ids = [token for token in kept if kept[token] * DRAWS >= 5]
    observed = [tokens.count(token) for token in ids] + [sum(token not in ids for token in tokens)]
    expected = [kept[token] * DRAWS for token in ids]
    expected.append(DRAWS - sum(expected))
    if expected[-1] < 1e-6:
        assert observed.pop() == 0
        expected.pop()
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > SIGNIFICANCE


def test_tokens_at_following_positions_are_independent(ops: Ops) -> None:
    tokens = draw(ops, [0.0, 0.0, 0.0, 0.0], 8000)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (tokens[::2], tokens[1::2]), 1)
    assert stats.chisquare(pairs.ravel()).pvalue > SIGNIFICANCE


# ---- choose: the edges of the filters


def test_top_k_keeps_the_smaller_ids_among_equals(ops: Ops) -> None:
    assert set(draw(ops, [0, 1, 1, 1, 0, 1], 300, top_k=3)) == {1, 2, 3}


def test_top_k_of_one_is_greedy(ops: Ops) -> None:
    assert set(draw(ops, [0, 1, 1, 0.9], 100, top_k=1, temperature=2.0)) == {1}


def test_top_k_beyond_the_vocabulary_is_off(ops: Ops) -> None:
    logits = [0.0, 1.0, 2.0]
    assert draw(ops, logits, 500, top_k=2**31 - 1) == draw(ops, logits, 500)


def test_top_p_of_zero_keeps_the_best_token_and_of_one_all(ops: Ops) -> None:
    logits = [0.0, 1.0, 1.0, 0.5]
    assert set(draw(ops, logits, 200, top_p=0.0)) == {1}
    assert set(draw(ops, logits, 200, top_p=1.0)) == {0, 1, 2, 3}


def test_top_p_counts_the_mass_before_a_token(ops: Ops) -> None:
    # Four equal tokens: the third has a half before it, which is at most a half; the fourth has more.
    assert set(draw(ops, [2, 2, 2, 2], 300, top_p=0.5)) == {0, 1, 2}
    assert set(draw(ops, [2, 2, 2, 2], 300, top_p=0.49)) == {0, 1}


def test_top_p_is_relative_to_what_top_k_left(ops: Ops) -> None:
    # Of the two best, each has a half; of all four, a quarter.
    assert set(draw(ops, [2, 2, 2, 2], 300, top_p=0.3, top_k=2)) == {0}
    assert set(draw(ops, [2, 2, 2, 2], 300, top_p=0.3)) == {0, 1}


def test_min_p_does_not_renormalise_for_top_p(ops: Ops) -> None:
    # Probabilities 0.4, 0.3 and thirty of 0.01. After min-p two remain, with 0.4 before the second: more than 0.39,
    # though it would be 0.57 if they were scaled up; with top-p 0.5 the second stays only because they are not.
    logits = [math.log(0.4), math.log(0.3)] + [math.log(0.01)] * 30
    assert set(draw(ops, logits, 300, min_p=0.5, top_p=0.39)) == {0}
    assert set(draw(ops, logits, 300, min_p=0.5, top_p=0.5)) == {0, 1}


def test_min_p_keeps_tokens_of_at_least_that_share_of_the_best(ops: Ops) -> None:
    logits = [10.0, 8.0, *np.linspace(2, 0, 20).tolist()]
    assert set(draw(ops, logits, 400, min_p=0.5)) == {0}
    assert set(draw(ops, logits, 400, min_p=0.1)) == {0, 1}


def test_min_p_of_one_keeps_all_that_equal_the_best(ops: Ops) -> None:
    assert set(draw(ops, [1, 3, 2.999, 3], 200, min_p=1.0)) == {1, 3}


def test_a_wide_flat_row_is_cut_exactly(ops: Ops) -> None:
    """The first half of 20,000 equal tokens, by id: far more than any shortcut looks at."""
    tokens = ops.choose(np.zeros((200, 20_000), np.float32), controls(200, top_p=0.5, seeds=1, positions=range(200)))
    assert tokens.max() <= 10_000
    assert tokens.max() > 9_500


def test_a_tiny_temperature_is_greedy_and_finite(ops: Ops) -> None:
    assert set(draw(ops, [0.0, 1.0, 0.999, -1e30], 200, temperature=1e-6)) == {1}


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 2.0])
def test_extreme_logits_choose_the_largest(ops: Ops, temperature: float) -> None:
    assert set(draw(ops, [-3e38, 1e30, -INF, 3e38, 0], 50, temperature=temperature, top_p=0.9)) == {3}


def test_masked_tokens_are_never_chosen(ops: Ops) -> None:
    logits = [-INF] * 40
    logits[33] = logits[7] = -1e4
    assert set(draw(ops, logits, 300, temperature=2.0, top_k=39, top_p=0.9999)) == {7, 33}


# ---- a row is alone


def test_a_rows_token_does_not_depend_on_its_neighbours(ops: Ops, rng: np.random.Generator) -> None:
    count, width = 40, 777
    logits = rng.normal(0, 2, (count, width)).astype(np.float32)
    how = controls(
        count,
        temperature=rng.choice([0, 0.5, 1, 2], count),
        top_k=rng.choice([0, 5, 300], count),
        top_p=rng.choice([1, 0.5, 0.95], count),
        min_p=rng.choice([0, 0.05], count),
        seeds=rng.integers(2**64, size=count, dtype=np.uint64),
        positions=rng.integers(1000, size=count),
    )
    alone = [int(ops.choose(logits[r : r + 1], take_controls(how, [r]))[0]) for r in range(count)]
    order = rng.permutation(count).tolist()
    assert ops.choose(logits[order], take_controls(how, order)).tolist() == [alone[r] for r in order]

    poisoned = logits.copy()
    poisoned[::4], poisoned[1::4], poisoned[3::4] = math.nan, INF, -INF
    mixed = ops.choose(poisoned, how).tolist()
    assert mixed[2::4] == alone[2::4]


def test_a_rows_edits_and_logprobs_have_the_same_bits_in_any_company(ops: Ops, rng: np.random.Generator) -> None:
    count, width = 9, 1003
    logits = rng.normal(0, 3, (count, width)).astype(np.float32)
    seen = {r: {int(i): int(rng.integers(4)) for i in rng.choice(width, 50, replace=False)} for r in range(count)}
    strengths = {"repetition": 1.3, "frequency": 0.7, "presence": -0.2}
    together, chosen = logits.copy(), rng.integers(width, size=count).astype(np.int32)
    ops.edit_logits(together, edits(count, width, seen=seen, **strengths))
    scored = ops.top_logprobs(together, chosen, 7)
    for r in range(count):
        alone = logits[r : r + 1].copy()
        ops.edit_logits(alone, edits(1, width, seen={0: seen[r]}, **strengths))
        assert alone.tobytes() == together[r].tobytes()
        one = ops.top_logprobs(alone, chosen[r : r + 1], 7)
        assert one.chosen.tobytes() == scored.chosen[r].tobytes()
        assert one.top_values.tobytes() == scored.top_values[r].tobytes()
        assert one.top_ids.tolist() == [scored.top_ids[r].tolist()]
        assert one.ranks[0] == scored.ranks[r]


# ---- edit_logits


def edited(ops: Ops, logits: FloatArray, **changes: object) -> list[list[float]]:
    result = logits.copy()
    ops.edit_logits(result, edits(*logits.shape, **changes))  # type: ignore[arg-type]
    return result.tolist()


def test_no_edits_change_nothing(ops: Ops, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((3, 40), np.float32)
    assert edited(ops, logits, repetition=2.0, frequency=1.0, presence=1.0) == logits.tolist()


def test_penalties_as_computed_by_hand(ops: Ops) -> None:
    """Prompt [2], output [0, 0, 1]; with temperature 0.5 this becomes [-0.5, -9.5, 1, 1]."""
    logits = rows([2, -2, 1, 0.5])
    changed = edited(ops, logits, seen={0: {0: 2, 1: 1, 2: 0}}, repetition=2.0, frequency=0.5, presence=0.25)
    assert changed == [[-0.25, -4.75, 0.5, 0.5]]


def test_penalties_against_the_oracle(ops: Ops, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 2, (1, 64)).astype(np.float32)
    logits[0, 5] = 0
    prompt, output = rng.integers(0, 64, 20).tolist(), rng.integers(0, 64, 30).tolist()
    rules = TokenRules(repetition_penalty=1.05, frequency_penalty=0.5, presence_penalty=0.3)
    seen = {token: output.count(token) for token in {*prompt, *output}}
    changed = edited(ops, logits, seen={0: seen}, repetition=1.05, frequency=0.5, presence=0.3)
    expected = oracle.edited_logits(logits[0].tolist(), rules, prompt, output, 64)
    assert changed[0] == pytest.approx(expected, abs=1e-5)


def test_negative_penalties_encourage(ops: Ops) -> None:
    assert edited(ops, rows([1, 1]), seen={0: {1: 3}}, frequency=-2.0, presence=-1.0) == [[1, 8]]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 100])
def test_only_allowed_ids_stay(ops: Ops, width: int) -> None:
    logits = np.ones((3, width), np.float32)
    keep = sorted({0, width // 2, width - 1})
    changed = edited(ops, logits, allowed={1: keep})
    assert changed[0] == changed[2] == [1.0] * width
    assert [i for i, z in enumerate(changed[1]) if z == 1] == keep
    assert sum(z == -INF for z in changed[1]) == width - len(keep)


def test_ids_beyond_the_tokenizer_are_masked_even_if_biased_or_not_finite(ops: Ops) -> None:
    logits = rows([1, 2, math.nan, INF])
    assert edited(ops, logits, vocab_size=2) == [[1, 2, -INF, -INF]]
    assert edited(ops, rows([1, 2, 3]), vocab_size=2, bias={0: {2: 50}}) == [[1, 2, -INF]]


def test_bias_comes_after_the_allowed_ids_and_before_the_penalties(ops: Ops) -> None:
    changed = edited(
        ops, rows([-1, -1, 5]), allowed={0: [0, 1]}, bias={0: {0: 3.0, 2: 9.0}}, seen={0: {0: 0, 1: 0}}, repetition=2.0
    )
    assert changed == [[1, -2, -INF]]


def test_banned_ids_are_masked_whatever_the_bias(ops: Ops) -> None:
    logits = rows([0, 0, 0], [0, 0, 0])
    assert edited(ops, logits, bias={1: {1: 100.0}}, banned={1: [1, 2]}) == [[0, 0, 0], [0, -INF, -INF]]


def test_penalties_leave_masked_ids_masked(ops: Ops) -> None:
    changed = edited(ops, rows([-INF, 0]), seen={0: {0: 4}}, repetition=0.5, frequency=-2.0)
    assert changed == [[-INF, 0]]


@pytest.mark.parametrize("field", ["bias_ids", "seen_ids", "banned_ids"])
@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_id_outside_the_logits_is_refused(ops: Ops, field: str, wrong: int) -> None:
    given = edits(1, 5, bias={0: {1: 1.0}}, seen={0: {1: 1}}, banned={0: [1]})
    with pytest.raises(ValueError, match="vocabulary"):
        ops.edit_logits(np.zeros((1, 5), np.float32), replace(given, **{field: np.array([wrong], np.int32)}))


# ---- top_logprobs


@pytest.mark.parametrize("width", [1, 2, 17, 1000, 5003])
def test_logprobs_are_the_log_softmax(ops: Ops, rng: np.random.Generator, width: int) -> None:
    logits = rng.normal(0, 4, (5, width)).astype(np.float32)
    chosen = rng.integers(width, size=5).astype(np.int32)
    found = ops.top_logprobs(logits, chosen, 4)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")[:, : min(4, width)]
    assert found.chosen == pytest.approx(exact[np.arange(5), chosen], abs=2e-6, rel=2e-6)
    assert found.top_ids.tolist() == order.tolist()
    assert found.top_values == pytest.approx(np.take_along_axis(exact, order, axis=1), abs=2e-6, rel=2e-6)
    assert found.ranks.tolist() == [int((row >= row[c]).sum()) for row, c in zip(logits, chosen, strict=True)]


def test_a_shorter_list_is_the_beginning_of_a_longer_one(ops: Ops, rng: np.random.Generator) -> None:
    logits = np.round(rng.normal(0, 2, (3, 300)) * 2).astype(np.float32)
    chosen = np.zeros(3, np.int32)
    whole = ops.top_logprobs(logits, chosen, 10_000)
    assert whole.top_ids.shape == (3, 300)
    for k in (0, 1, 7, 299):
        part = ops.top_logprobs(logits, chosen, k)
        assert part.top_ids.tolist() == whole.top_ids[:, :k].tolist()
        assert part.top_values.tobytes() == np.ascontiguousarray(whole.top_values[:, :k]).tobytes()


def test_equal_logits_are_listed_by_smaller_id_and_share_a_rank(ops: Ops) -> None:
    found = ops.top_logprobs(rows([1, 2, 2, 0, 2]), np.array([2], np.int32), 4)
    assert found.top_ids.tolist() == [[1, 2, 4, 0]]
    assert found.ranks.tolist() == [3]


def test_extreme_logits_give_probabilities_of_one_and_zero(ops: Ops) -> None:
    found = ops.top_logprobs(rows([-3e38, 3e38, 0], [-INF, 0, -INF]), np.array([1, 1], np.int32), 2)
    assert found.chosen.tolist() == [0, 0]
    assert found.top_values.tolist() == [[0, pytest.approx(-3e38)], [0, -INF]]


@pytest.mark.parametrize("broken", [[0, math.nan], [INF, 0], [-INF, -INF]])
def test_logprobs_of_a_row_without_a_finite_largest_logit_are_nan(ops: Ops, broken: list[float]) -> None:
    found = ops.top_logprobs(rows([1, 0], broken), np.array([0, 0], np.int32), 1)
    assert math.isfinite(found.chosen[0])
    assert math.isnan(found.chosen[1])
    assert math.isnan(found.top_values[1, 0])


def test_logprobs_of_an_id_outside_the_logits_are_refused(ops: Ops) -> None:
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="vocabulary"):
            ops.top_logprobs(np.zeros((1, 3), np.float32), np.array([wrong], np.int32), 1)
