"""An engine process around a runner without weights that a prompt can kill: ``python fragile_engine.py FD``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, str(Path(__file__)))
"""For :class:`paceline.engine.links.EngineProcess`."""
KILLS, HANGS, RAISES = b"!?#"
"""Tokens that end the process, stand still in the step, or raise from it, once they are to be computed."""


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from paceline.engine import process
    from paceline.engine.load import Runtime
    from paceline.types import StepPlan, StepResult
    from support.fake_runner import FakeRunner
    from support.small_text import small_engine

    class FragileRunner(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            started = {token for start in plan.start for token in start.tokens}
            if KILLS in started:
                os.kill(os.getpid(), signal.SIGKILL)
            if HANGS in started:
                time.sleep(1000)
            if RAISES in started:
                raise MemoryError("the machine is full")
            time.sleep(0.002)
            return super().execute(plan)

    loaded = small_engine(FragileRunner(64, 8, 8, 259))
    process.load_runtime = lambda _: Runtime(loaded.engine, loaded.facts)
    sys.exit(process.serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
