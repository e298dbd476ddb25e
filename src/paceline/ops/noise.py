"""Noise without state: a number for each (seed, position, token id), from which the next token is drawn.

A sequence's draw at one position depends on nothing but its seed, so that batch mates, preemptions and rejected drafts
cannot shift it. Every implementation of :meth:`~paceline.ops.api.Ops.choose` follows these steps; all integers are
unsigned 64-bit and wrap around::

    G      = 0x9E3779B97F4A7C15
    mix(x) : x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    row    = mix(mix(seed + G) + (position + 1) * G)
    bits   = mix(row + (id + 1) * G)
    u      = ((bits >> 12) + 0.5) * 2^-52          float64, exact: 2^-53 <= u <= 1 - 2^-53
    gumbel = -ln(-ln(u))                           float64

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014, with
the constants of Stafford's "Mix13"), and ``bits`` for id = 0, 1, 2, ... is exactly the output of SplitMix64 started at
``row``; the rows of a seed are likewise the outputs of the generator started at ``mix(seed + G)``. Adding independent
Gumbel noise to log-probabilities and taking the largest draws from the distribution (arXiv:1411.0030).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.tensors import Array

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_CHOICE = 0x6A09E667F3BCC909
"""The fractional bits of the square root of 2, made odd: choices step through other numbers than positions do."""

GUMBEL_MIN = -3.61
GUMBEL_MAX = 36.74
"""The noise lies strictly between these: -ln(53 ln 2) and 53 ln 2, rounded outwards."""


def gumbel(seed: int, position: int, ids: Array) -> npt.NDArray[np.float64]:
    """Gumbel noise, float64, for token ids [N] (any integer type, not negative) at one position of one sequence."""
    noise = uniform(seed, position, ids)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def uniform(seed: int, position: int, ids: Array) -> npt.NDArray[np.float64]:
    """Uniform numbers strictly between 0 and 1, float64, for token ids [N]."""
    bits = noise_bits(seed, position, ids)
    bits >>= np.uint64(12)
    numbers = bits.astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def noise_bits(seed: int, position: int, ids: Array) -> npt.NDArray[np.uint64]:
    """The 64 hashed bits for token ids [N]: the integer part of the module's steps."""
    row = _mix(_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN & _MASK)
    x = ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(row)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def fold_choice(seed: int, index: int) -> int:
    """The seed, 0 .. 2^64 - 1, of choice ``index`` of a request: choice 0 has the seed itself (modulo 2^64).

    Choice j > 0 has mix(seed + j * 0x6A09E667F3BCC909).
    """
    return seed & _MASK if index == 0 else _mix((seed + index * _CHOICE) & _MASK)


def _mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
