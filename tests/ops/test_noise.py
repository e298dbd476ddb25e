"""The noise must be reproducible by any implementation, and look random along each of its three arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paceline.ops.noise import GUMBEL_MAX, GUMBEL_MIN, fold_choice, gumbel, noise_bits, uniform

MASK = 2**64 - 1
GOLDEN_0_0 = [2558736989570252433, 17913671590881668180, 4045813962736552049, 14726135625726115545]
GOLDEN_MAX = [17673050890567185610, 16876558923713796906, 1510049696591302608, 595352106736226305]
GOLDEN_CHOICES = [42, 12791669859683693672, 13126239575872558156]
SIGNIFICANCE = 1e-4
"""Seeds are fixed, so a test that passes once passes always; this bounds how unlucky a sound generator may be."""


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as its authors define it, in plain integers."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def test_the_plain_generator_gives_its_published_first_outputs() -> None:
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 2**63, MASK])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31 - 1])
def test_bits_are_the_outputs_of_nested_generators(seed: int, position: int) -> None:
    [inner] = splitmix64(seed, 1)
    [row] = splitmix64((inner + position * 0x9E3779B97F4A7C15) & MASK, 1)
    assert noise_bits(seed, position, np.arange(50)).tolist() == splitmix64(row, 50)


def test_known_values_for_other_implementations() -> None:
    ids = np.array([0, 1, 49151, 2**31 - 1])
    assert noise_bits(0, 0, ids).tolist() == GOLDEN_0_0
    assert noise_bits(MASK, 2**31 - 1, ids).tolist() == GOLDEN_MAX
    assert [fold_choice(42, j) for j in range(3)] == GOLDEN_CHOICES
    assert uniform(0, 0, ids[:1])[0] == (float(GOLDEN_0_0[0] >> 12) + 0.5) / 2**52
    assert gumbel(0, 0, ids[:1])[0] == pytest.approx(-math.log(-math.log(uniform(0, 0, ids[:1])[0])), rel=1e-15)


def test_a_value_does_not_depend_on_the_ids_beside_it() -> None:
    ids = np.arange(1001)
    together = gumbel(7, 3, ids)
    assert all(gumbel(7, 3, ids[i : i + 1])[0] == together[i] for i in ids)
    assert np.array_equal(gumbel(7, 3, ids[::-1]), together[::-1])


def test_integer_types_of_ids_do_not_matter() -> None:
    assert np.array_equal(gumbel(7, 3, np.arange(9, dtype=np.int32)), gumbel(7, 3, np.arange(9, dtype=np.int64)))


def test_extreme_bits_stay_finite_and_inside_the_stated_range() -> None:
    lowest, highest = 0.5 * 2.0**-52, 1 - 2.0**-53
    assert -math.log(-math.log(lowest)) > GUMBEL_MIN
    assert -math.log(-math.log(highest)) < GUMBEL_MAX


def sample_along(axis: str, count: int) -> np.ndarray:
    match axis:
        case "id":
            return uniform(11, 5, np.arange(count))
        case "position":
            return np.array([uniform(11, i, np.array([5]))[0] for i in range(count)])
        case "seed":
            return np.array([uniform(i, 11, np.array([5]))[0] for i in range(count)])
        case "choice":
            return np.array([uniform(fold_choice(11, i), 5, np.array([5]))[0] for i in range(count)])
    raise AssertionError(axis)


@pytest.mark.parametrize("axis", ["id", "position", "seed", "choice"])
def test_numbers_are_uniform_along_each_argument(axis: str) -> None:
    assert stats.kstest(sample_along(axis, 20_000), "uniform").pvalue > SIGNIFICANCE


@pytest.mark.parametrize("axis", ["id", "position", "seed", "choice"])
def test_consecutive_numbers_are_independent(axis: str) -> None:
    numbers = sample_along(axis, 40_000)
    pairs, _, _ = np.histogram2d(numbers[::2], numbers[1::2], bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 5), (2, 5)), ((1, 5), (1, 6)), ((1, 5), (5, 1)), ((0, 0), (MASK, 0)), ((1, 5), (fold_choice(1, 1), 5))],
)
def test_two_rows_are_independent(first: tuple[int, int], second: tuple[int, int]) -> None:
    ids = np.arange(30_000)
    pairs, _, _ = np.histogram2d(uniform(*first, ids), uniform(*second, ids), bins=8, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > SIGNIFICANCE


def test_each_bit_is_set_half_of_the_time_along_small_seeds_and_positions() -> None:
    bits = np.array([noise_bits(s, p, np.array([0]))[0] for s in range(100) for p in range(100)])
    ones = [int(((bits >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(64)]
    assert all(4750 < count < 5250 for count in ones)  # five standard deviations


def test_gumbel_noise_follows_its_distribution() -> None:
    assert stats.kstest(gumbel(3, 4, np.arange(50_000)), stats.gumbel_r.cdf).pvalue > SIGNIFICANCE


def test_the_first_choice_keeps_the_seed_and_the_others_differ() -> None:
    assert fold_choice(42, 0) == 42
    assert fold_choice(-1, 0) == MASK
    seeds = {fold_choice(seed, j) for seed in range(100) for j in range(128)}
    assert len(seeds) == 100 * 128
