"""The implementations of the operations that can run on this machine."""

from __future__ import annotations

from paceline.ops.api import Ops
from paceline.ops.reference import ReferenceOps


def available_ops() -> list[Ops]:
    return [ReferenceOps()]
