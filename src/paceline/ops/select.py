"""Which implementation of the operations runs."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.ops.api import Ops
from paceline.ops.reference import ReferenceOps

OPS_NAMES = ("auto", "reference")


def make_ops(name: str, num_threads: int | None) -> Ops:  # noqa: ARG001 - for implementations with threads
    """The implementation called ``name``; "auto" is the best one that works here.

    ``num_threads`` None takes the implementation's own default; the reference always computes on one thread. Raises
    ConfigError for a name that is not in ``OPS_NAMES``.
    """
    if name not in OPS_NAMES:
        raise ConfigError(f"ops must be one of {', '.join(OPS_NAMES)}, not {name!r}")
    return ReferenceOps()
