from __future__ import annotations

import math

import numpy as np

from paceline.models.rope import build_rope_table, linear_divisors, llama3_divisors
from paceline.models.spec import RopeSpec
from paceline.ops.api import RopeStyle


def test_angles_follow_the_formula_to_the_last_bit_far_into_the_context() -> None:
    """At position 100,000 a float32 product of position and frequency would be wrong in the third digit."""
    table = build_rope_table(RopeSpec(500_000.0, 64, RopeStyle.HALVES), 100_001)
    assert table.cos.shape == table.sin.shape == (100_001, 32)
    assert table.cos.dtype == np.float32
    assert table.style is RopeStyle.HALVES
    for position in (0, 1, 4097, 100_000):
        for i in (0, 7, 31):
            angle = position * 500_000.0 ** (-2 * i / 64)
            assert abs(table.cos[position, i] - math.cos(angle)) < 1e-7
            assert abs(table.sin[position, i] - math.sin(angle)) < 1e-7


def test_linear_scaling_makes_room_between_the_positions() -> None:
    plain = build_rope_table(RopeSpec(10_000.0, 32, RopeStyle.PAIRS), 11)
    scaled = build_rope_table(RopeSpec(10_000.0, 32, RopeStyle.PAIRS, linear_divisors(4.0, 32)), 41)
    assert np.allclose(scaled.cos[::4], plain.cos, atol=1e-7)
    assert np.allclose(scaled.sin[::4], plain.sin, atol=1e-7)


def test_llama3_scaling_leaves_short_waves_and_stretches_long_ones() -> None:
    divisors = np.array(llama3_divisors(500_000.0, 128, 8.0, 1.0, 4.0, 8192))
    wavelengths = 2 * math.pi * 500_000.0 ** (np.arange(0, 128, 2) / 128)
    assert np.all(divisors[wavelengths < 8192 / 4] == 1)
    assert np.all(divisors[wavelengths > 8192] == 8)
    between = divisors[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) > 2
    assert np.all(np.diff(between) > 0)
    assert np.all((between > 1) & (between < 8))
