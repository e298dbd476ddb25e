"""Random scenarios for scheduler and key-value shadow. By hand: ``python -m support.scheduler_fuzz 10000``."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.errors import RequestError
from paceline.types import FinishReason, StepPlan, TokenEvent, TokenRules
from support.fake_runner import FakeRunner, SoloAnswer, solo_answer


@dataclass
class _Record:
    """What one request received. ``disturbed`` means that the scenario itself may have ended it."""

    request: Request
    expected: SoloAnswer
    events: list[TokenEvent] = field(default_factory=list)
    disturbed: bool = False

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].finish_reason is not None


def run_scenario(seed: int) -> Counter[str]:
    """Run one scenario to its end, raising AssertionError if anything is wrong. Returns what happened how often."""
    scenario = _Scenario(random.Random(seed))
    scenario.run()
    return scenario.counts


class _Scenario:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.block_size = rng.choice([1, 2, 3, 4, 8, 16])
        # Few tokens of room, so that a handful of requests fill it.
        capacity = rng.choice([rng.randint(1, 30), rng.randint(20, 150)])
        self.num_blocks = max(capacity // self.block_size, 1)
        self.vocab_size = rng.choice([8, 100, 1000, 1000])
        self.now = 0.0
        self.limits = SchedulerLimits(
            max_num_seqs=rng.randint(1, 7),
            max_num_batched_tokens=rng.choice([1, 1, 2, 3, 5, 8, 16, 64]),
            max_model_len=rng.choice([rng.randint(1, 20), rng.randint(20, 150), 150, 150]),
            queue_timeout=rng.choice([None, None, None, rng.uniform(1, 30)]),
            admission_age_limit=rng.choice([0, 1, 3, 64]),
            decode_blocks_ahead=rng.choice([0, 0, 1, 2]),
            target_step_ms=rng.choice([None, 1.0, 100.0]),
            pair_cost=rng.choice([0.0, 0.1]),
        )
        caching = rng.random() < 0.8
        kv = KvManager(self.num_blocks, self.block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.limits, kv, clock=lambda: self.now)
        self.runner = FakeRunner(
            self.num_blocks,
            self.block_size,
            self.limits.max_num_seqs,
            self.vocab_size,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
        )
        self.longest = max(capacity * rng.choice([1, 1, 1, 2, 3, 5]) // 5, 2)
        self.outputs = rng.choice([20, 80, capacity])
        self.stems = [self._tokens(rng.randint(1, self.longest)) for _ in range(rng.randint(1, 3))]
        self.salts = rng.choice([[""], ["", "a", "b"]])
        self.adapters = rng.choice([[None], [None, "x", "y"]])
        self.unrest = rng.choice([0.0, 0.05, 0.3])
        self.records: dict[str, _Record] = {}
        self.record_of_seed: dict[int, _Record] = {}
        self.salt_of_block: dict[int, str] = {}
        self.salt_of_slot: dict[int, str] = {}

    def run(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        to_come = rng.randint(1, 16)
        hurry = rng.choice([0.05, 0.3, 1.0])
        while to_come or scheduler.has_work():
            while to_come and (rng.random() < hurry or not scheduler.has_work()):
                to_come -= 1
                self._add()
            self._disturb()
            self._step()
        scheduler.check_idle()
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_blocks_used == 0
        for record in self.records.values():
            self._judge(record)
        self.counts["steps"] = self.runner.num_steps
        self.counts["preemptions"] = scheduler.num_preemptions
        self.counts["cached tokens"] = scheduler.prefix_hits

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    def _add(self) -> None:
        rng = self.rng
        stem = rng.choice(self.stems)
        at_border = rng.randint(0, 6) * self.block_size + rng.choice([-1, 0, 1])
        length = max(rng.choice([at_border, rng.randint(1, self.longest)]), 0)
        tail = self._tokens(rng.choice([0, 0, 1, rng.randint(0, self.longest)]))
        prompt = (stem[:length] + tail)[: rng.choice([self.longest, 150])] or [0]
        max_tokens = rng.choice([0, 1, 2, *(rng.randint(1, self.outputs) for _ in range(6))])
        number = len(self.record_of_seed)
        rules = TokenRules(
            seed=number * 7919 + rng.randrange(7919),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            eos_token_ids=rng.choice([(), (), (1,)]),
            stop_token_ids=rng.choice([(), (), (2,), (1, 3)]),
            early_stop_window=rng.choice([0, 0, 1, 3]),
            early_stop_threshold=rng.choice([0.5, 0.9]),
            logprobs=rng.choice([None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        salt, adapter = rng.choice(self.salts), rng.choice(self.adapters)
        request = Request(f"r{number}", prompt, rules, rng.choice([0, 0, 1, 5]), salt, adapter)
        expected = solo_answer(
            prompt,
            rules,
            vocab_size=self.vocab_size,
            max_model_len=self.limits.max_model_len,
            max_stored_tokens=self.num_blocks * self.block_size,
            adapter=adapter,
        )
        record = _Record(request, expected)
        self.record_of_seed[rules.seed] = record
        possible = len(prompt) + min(max_tokens, 1) <= self.limits.max_model_len
        possible &= len(prompt) + (max_tokens > 1) <= self.num_blocks * self.block_size
        try:
            self.scheduler.add(request)
        except RequestError:
            assert not possible
            self.counts["refused: can never run"] += 1
        else:
            assert possible
            self.records[request.request_id] = record

    def _disturb(self) -> None:
        """Abort, fail or reset, in whatever state things are."""
        rng = self.rng
        if not self.records or rng.random() >= self.unrest:
            return
        record = rng.choice(list(self.records.values()))
        action = rng.random()
        if action < 0.1:
            self.scheduler.reset_prefix_cache()
            return
        name = record.request.request_id
        did = self.scheduler.fail(name, "on purpose") if action < 0.3 else self.scheduler.abort(name)
        assert not (did and (record.ended or record.disturbed)), "it had ended already"
        assert not self.scheduler.abort(name)
        record.disturbed |= did

    def _step(self) -> None:
        scheduler, preemptions = self.scheduler, self.scheduler.num_preemptions
        plan = scheduler.plan()
        assert plan.spans or not (scheduler.num_running or scheduler.num_waiting), "nothing moves"
        assert not (plan.start and scheduler.num_preemptions > preemptions), "admitted in a step that preempted"
        slots_at_work = {span.slot for span in plan.spans}
        running = [record.request for record in self.records.values() if record.request.slot is not None]
        assert all(r.slot in slots_at_work for r in running if r.num_left == 1), "a decode has to wait"
        self._check_salts(plan)
        result = self.runner.execute(plan)
        self._disturb()
        self.now += self.rng.choice([0.0, 0.01, 0.1, 1.0])
        for event in scheduler.commit(plan, result):
            record = self.records[event.request_id]
            assert not record.ended, "an event after the end"
            record.events.append(event)

    def _check_salts(self, plan: StepPlan) -> None:
        for start in plan.start:
            salt = self.record_of_seed[start.rules.seed].request.cache_salt
            shared = start.num_computed // self.block_size
            assert all(self.salt_of_block[block] == salt for block in start.blocks[:shared]), "shared across salts"
            self.salt_of_block.update((block, salt) for block in start.blocks[shared:])
            self.salt_of_slot[start.slot] = salt
        for span in plan.spans:
            self.salt_of_block.update((block, self.salt_of_slot[span.slot]) for block in span.new_blocks)

    def _judge(self, record: _Record) -> None:
        assert record.ended, f"{record.request.request_id} never ended"
        expected, last = record.expected, record.events[-1]
        tokens = tuple(token for event in record.events for token in event.token_ids)
        logprobs = tuple(entry for event in record.events for entry in event.logprobs)
        scores = tuple(entry for event in record.events for entry in event.prompt_logprobs)
        assert len({event.num_cached_tokens for event in record.events}) == 1 or record.disturbed
        timed_out = last.error is not None and "queue_timeout" in last.error
        if record.disturbed or timed_out:
            # Cut short by others: what was delivered is still the beginning of the right answer.
            assert tokens == expected.tokens[: len(tokens)]
            assert logprobs == expected.logprobs[: len(logprobs)]
            assert scores == expected.prompt_logprobs[: len(scores)]
            assert last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or tokens == expected.tokens
            assert not (timed_out and tokens)
        else:
            assert (tokens, logprobs, scores) == (expected.tokens, expected.logprobs, expected.prompt_logprobs)
            assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert (last.error is not None) == (last.finish_reason is FinishReason.ERROR)
        self.counts["timed out" if timed_out else f"ended: {last.finish_reason.value}"] += 1


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            total += run_scenario(seed)
        except BaseException:
            print(f"scenario {seed} failed", file=sys.stderr)
            raise
    print(f"{count} scenarios passed:", dict(total))


if __name__ == "__main__":
    main()
