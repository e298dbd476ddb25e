"""Angles of the rotary position embedding, by absolute position."""

from __future__ import annotations

import math

import numpy as np

from paceline.models.spec import RopeSpec
from paceline.ops.api import RopeTable


def build_rope_table(spec: RopeSpec, max_positions: int) -> RopeTable:
    """Cosines and sines of positions 0 .. max_positions - 1, computed in float64 and rounded once to float32."""
    frequencies = _frequencies(spec.theta, spec.dim)
    if spec.divisors:
        frequencies = frequencies / np.asarray(spec.divisors)
    angles = np.arange(max_positions)[:, None] * frequencies
    return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), spec.style)


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
