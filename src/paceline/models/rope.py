"""Angles of the rotary position embedding, by absolute position."""

from __future__ import annotations

import math

import numpy as np

from paceline.models.spec import RopeSpec
from paceline.ops.api import RopeTable

POSITIONS_AT_ONCE = 4096
"""Rows of a table that are in memory in float64 at a time: contexts may be of a million tokens."""


def build_rope_table(spec: RopeSpec, max_positions: int) -> RopeTable:
    """Cosines and sines of positions 0 .. max_positions - 1, computed in float64 and rounded once to float32."""
    frequencies = _frequencies(spec.theta, spec.dim)
    if spec.divisors:
        frequencies = frequencies / np.asarray(spec.divisors)
    cos, sin = (np.empty((max_positions, len(frequencies)), np.float32) for _ in range(2))
    for first in range(0, max_positions, POSITIONS_AT_ONCE):
        positions = np.arange(first, min(first + POSITIONS_AT_ONCE, max_positions))
        angles = positions[:, None] * frequencies
        cos[positions], sin[positions] = np.cos(angles), np.sin(angles)
    return RopeTable(cos, sin, spec.style)


def linear_divisors(factor: float, dim: int) -> tuple[float, ...]:
    """Positions interpolated by one factor (arXiv:2306.15595)."""
    return (factor,) * (dim // 2)


def llama3_divisors(
    theta: float, dim: int, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are stretched by ``factor``, short ones not, those between by degrees.

    With wavelength w = 2 pi / frequency and context c: w > c / low is divided by the factor, w < c / high is left;
    between, the frequency is scaled by (1 - s) / factor + s, s = (c / w - low) / (high - low). Source: the reference
    code published with the model (``apply_scaling`` in llama-models).
    """
    wavelengths = 2 * math.pi / _frequencies(theta, dim)
    smooth = (original_context / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return tuple(float(d) for d in 1.0 / ((1.0 - smooth) / factor + smooth))


def _frequencies(theta: float, dim: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.float64(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
