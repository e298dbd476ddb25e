"""Which implementation of the operations runs."""

from __future__ import annotations

import logging

from paceline.errors import ConfigError
from paceline.ops.api import Ops
from paceline.ops.reference import ReferenceOps
from paceline.ops.threads import usable_cores

logger = logging.getLogger(__name__)

OPS_NAMES = ("auto", "cpu", "reference")
QUANTIZATIONS = ("int8", "int4")


def make_ops(name: str, num_threads: int | None, isa: str | None = None, quantization: str | None = None) -> Ops:
    """The implementation called ``name``; "auto" is the native one, or the reference where that was not built.

    ``num_threads`` None takes the cores that this process may really use; the reference always computes on one thread.
    ``isa`` None takes the widest instruction set of this machine. ``quantization`` is what dense matrices become, with
    the native kernels only; None keeps them. Raises ConfigError for a value that is unknown here.
    """
    if name not in OPS_NAMES:
        raise ConfigError(f"ops must be one of {', '.join(OPS_NAMES)}, not {name!r}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be {' or '.join(QUANTIZATIONS)}, not {quantization!r}")
    if name == "reference":
        return _make_reference(quantization)
    try:
        from paceline.ops.cpu import CpuOps
    except ImportError as error:
        if name == "cpu":
            raise ConfigError(f"ops cpu needs the native kernels, which cannot be loaded: {error}") from error
        logger.warning("the native kernels cannot be loaded (%s): running on the slow reference", error)
        return _make_reference(quantization)
    cores, reason = usable_cores()
    try:
        ops = CpuOps(num_threads or cores, isa, quantization)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    chosen = "as asked for" if num_threads else reason
    logger.info("native kernels: %s, %d threads (%s)", ops.isa, ops.num_threads, chosen)
    return ops


def _make_reference(quantization: str | None) -> Ops:
    if quantization is not None:
        raise ConfigError(f"quantization {quantization} needs the native kernels; the reference computes in float32")
    return ReferenceOps()
