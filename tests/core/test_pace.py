"""A long prompt beside running streams: its pieces are as large as the streams' patience allows."""

from __future__ import annotations

import pytest

from paceline.core.kv_manager import KvManager
from paceline.core.pace import MIN_WORK, Pace
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.types import SeqSpan, StepPlan, TokenRules
from support.fake_runner import FakeRunner

VOCAB, BLOCK = 50_000, 16
PAIR_COST = 1 / 2000


class Machine:
    """A scheduler and a machine whose steps take ``fixed`` seconds and ``per_work`` for each unit of work."""

    def __init__(self, target_ms: float | None, *, fixed: float, per_work: float, context: int = 10_000) -> None:
        self.now = 0.0
        self.fixed, self.per_work = fixed, per_work
        num_blocks = 2 * context // BLOCK
        limits = SchedulerLimits(8, 512, context, target_step_ms=target_ms, pair_cost=PAIR_COST)
        self.scheduler = Scheduler(limits, KvManager(num_blocks, BLOCK), clock=lambda: self.now)
        self.runner = FakeRunner(num_blocks, BLOCK, 8, VOCAB, max_num_batched_tokens=512)

    def add(self, name: str, prompt: int, max_tokens: int) -> None:
        tokens = [(position * 31 + sum(name.encode())) % VOCAB for position in range(prompt)]
        self.scheduler.add(Request(name, tokens, TokenRules(max_tokens=max_tokens)))

    def step(self) -> tuple[StepPlan, float]:
        """The step and the seconds that it took."""
        begin = self.now
        plan = self.scheduler.plan()
        result = self.runner.execute(plan)
        work = sum(s.count * (1 + PAIR_COST * (s.start + (s.count + 1) / 2)) for s in plan.spans)
        self.now += self.fixed + self.per_work * work
        self.scheduler.commit(plan, result)
        return plan, self.now - begin


def beside_streams(machine: Machine, prompt: int) -> list[tuple[int, float]]:
    """(prompt tokens, seconds) of each step in which a prompt is computed beside four streams."""
    for number in range(4):
        machine.add(f"stream {number}", 40, 2000)
    while any(span.count > 1 for span in machine.step()[0].spans):
        pass
    machine.add("long", prompt, 1)
    steps = []
    while True:
        plan, seconds = machine.step()
        pieces = [span.count for span in plan.spans if span.count > 1 or span.slot == 4]
        if not pieces:
            return steps
        assert sum(span.count == 1 for span in plan.spans) >= 4, "a stream has to wait"
        steps.append((sum(pieces), seconds))


@pytest.mark.parametrize(("fixed", "per_work"), [(0.0, 0.002), (0.05, 0.002), (0.01, 0.0005)])
def test_no_step_keeps_streams_waiting_longer_than_asked_and_little_is_left_unused(
    fixed: float, per_work: float
) -> None:
    steps = beside_streams(Machine(200.0, fixed=fixed, per_work=per_work), 8000)
    assert sum(tokens for tokens, _ in steps) == 8000
    assert max(seconds for _, seconds in steps) <= 0.2 * (1.15 if fixed else 1.02)
    late = steps[12:-1]
    assert all(tokens == 512 or seconds >= 0.2 * 0.9 for tokens, seconds in late)


def test_without_a_target_the_token_budget_alone_counts() -> None:
    steps = beside_streams(Machine(None, fixed=0.0, per_work=0.002), 4000)
    assert {tokens for tokens, _ in steps[:-1]} == {508}


def test_a_prompt_that_nobody_waits_for_takes_the_whole_budget() -> None:
    machine = Machine(1.0, fixed=1.0, per_work=1.0)
    machine.add("alone", 2000, 1)
    assert [machine.step()[0].spans[0].count for _ in range(4)] == [512, 512, 512, 464]


def test_a_target_that_cannot_be_kept_slows_prompts_down_and_does_not_stop_them() -> None:
    steps = beside_streams(Machine(1.0, fixed=1.0, per_work=0.1), 1000)
    assert steps[0][0] == MIN_WORK - 1  # its own tokens attend to each other
    assert all(0 < tokens < MIN_WORK for tokens, _ in steps)


def test_several_prompts_share_the_room_of_one_step() -> None:
    machine = Machine(200.0, fixed=0.0, per_work=0.002)
    steps = beside_streams(machine, 3000)
    assert steps
    for name in "ab":
        machine.add(name, 3000, 1)
    while machine.scheduler.num_running > 4 or machine.scheduler.num_waiting:
        assert machine.step()[1] <= 0.2 * 1.02


def test_a_slower_step_counts_at_once_and_a_faster_one_by_and_by() -> None:
    pace, spans = Pace(1.0, 0.0), (SeqSpan(0, 0, 100),)
    assert pace.room(()) == MIN_WORK
    pace.learn(spans, 1.0)
    assert pace.room(()) == pytest.approx(100)
    pace.learn(spans, 2.0)
    assert pace.room(()) == pytest.approx(50)
    pace.learn(spans, 1.0)
    assert pace.room(()) == pytest.approx(1 / 0.0175)
    pace.learn((SeqSpan(0, 0, 1), SeqSpan(1, 0, 15)), 100.0)
    assert pace.room((SeqSpan(0, 0, 1),)) == pytest.approx(1 / 0.0175 - 1), "too small a step tells nothing"


@pytest.mark.parametrize("pair_cost", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("start", [0, 7, 5000])
def test_fitting_is_the_inverse_of_work(pair_cost: float, start: int) -> None:
    pace = Pace(1.0, pair_cost)
    for count in (1, 2, 33, 500):
        assert pace.fitting(start, pace.work(start, count) * (1 + 1e-9)) == count
        assert pace.fitting(start, pace.work(start, count) * (1 - 1e-9)) == count - 1
    assert pace.fitting(start, 0.0) == 0
