"""``paceline pull``: fetch a model now, so that it is there later."""

from __future__ import annotations

import argparse

from paceline.checkpoint.fetch import resolve_model
from paceline.config import read_environment


def pull(args: argparse.Namespace) -> int:
    environment = read_environment()
    print(resolve_model(args.model, cache=environment.cache, offline=environment.offline))
    return 0
