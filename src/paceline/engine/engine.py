"""The step loop: the only place where scheduler and runner meet."""

from __future__ import annotations

from typing import Protocol

from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.types import StepPlan, StepResult, TokenEvent


class Runner(Protocol):
    """Whatever executes plans: the model runner, or a stand-in for it in tests."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class Engine:
    """Drives requests to their end, one step at a time. It has no thread and no clock of its own."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self._runner = runner

    def add(self, request: Request) -> None:
        """Queue a sequence. Raises RequestError if it can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a sequence in whatever state it is; False if there is none of this id. Safe to repeat."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def reset(self) -> None:
        """Forget every request and every cached prefix, whatever state an interrupt has left: start afresh.

        The runner needs nothing: it writes all of a slot whenever a sequence starts.
        """
        old = self.scheduler
        kv = KvManager(old.kv.num_blocks, old.kv.block_size, enable_prefix_caching=old.kv.enable_prefix_caching)
        self.scheduler = Scheduler(old.limits, kv)

    def step(self) -> list[TokenEvent]:
        """Plan, execute, commit. Returns the news of every sequence that has any."""
        return self.run(self.plan())

    def plan(self) -> StepPlan:
        """The next step, which :meth:`run` must carry out before another is planned."""
        return self.scheduler.plan()

    def run(self, plan: StepPlan) -> list[TokenEvent]:
        """Execute and commit a step."""
        events = self.scheduler.commit(plan, self._runner.execute(plan))
        if not self.has_work:
            self.scheduler.check_idle()
        return events
