"""The implementations of the operations that work on this machine, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline import _native
from paceline.ops.api import Ops
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps


@dataclass(frozen=True)
class Implementation:
    """``make`` takes a number of threads. ``kv_error`` is the relative error of what the store keeps.

    ``error`` is that of the row operations (norms, activations, attention) against the exact formula.
    """

    name: str
    make: Callable[[int], Ops]
    error: float = 2e-6
    kv_error: float = 0.0


def implementations() -> list[Implementation]:
    """The reference, and the native kernels on every instruction set that this machine runs."""
    native = [
        Implementation(f"cpu-{isa}", lambda threads, isa=isa: CpuOps(threads, isa), kv_error=2.0**-9)
        for isa in _native.levels()
    ]
    return [Implementation("reference", lambda threads: ReferenceOps()), *native]  # noqa: ARG005
