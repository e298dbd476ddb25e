"""Scenarios of one scheduler with the pretended model, step by step."""

from __future__ import annotations

import pytest

from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.errors import RequestError
from paceline.types import FinishReason, SeqResult, StepPlan, StepResult, TokenEvent, TokenRules
from support.fake_runner import FakeRunner, SoloAnswer, solo_answer

VOCAB = 50_000


class Bench:
    """A scheduler, a runner, a clock that stands still, and everything that was said."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 64,
        max_model_len: int = 10_000,
        caching: bool = True,
        **limits: float | None,
    ) -> None:
        self.now = 0.0
        self.max_model_len = max_model_len
        self.kv = KvManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs, budget, max_model_len, **limits), self.kv, clock=lambda: self.now
        )
        self.runner = FakeRunner(
            num_blocks, block_size, max_num_seqs, VOCAB, max_num_batched_tokens=budget, error_token=666
        )
        self.events: list[TokenEvent] = []

    def add(self, name: str, prompt: list[int] | int, *, priority: int = 0, **rules: object) -> Request:
        """A number stands for a prompt of that many tokens, different for each name."""
        tokens = [sum(name.encode()) * 100 + i % 100 for i in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request(name, list(tokens), TokenRules(**{"max_tokens": 100, **rules}), priority)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.events += self.scheduler.commit(plan, self.runner.execute(plan))
        return plan

    def spans(self) -> list[tuple[int, int, int]]:
        """One step; its spans as (slot, start, end)."""
        return [(span.slot, span.start, span.start + span.count) for span in self.step().spans]

    def finish(self) -> None:
        while self.scheduler.has_work():
            self.step()
        self.scheduler.check_idle()

    def solo(self, request: Request) -> SoloAnswer:
        return solo_answer(
            request.tokens[: request.num_prompt],
            request.rules,
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            max_stored_tokens=self.kv.num_blocks * self.kv.block_size,
        )

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for event in self.events if event.request_id == name for token in event.token_ids)

    def ends(self, name: str) -> list[TokenEvent]:
        return [event for event in self.events if event.request_id == name and event.finish_reason is not None]


# ---- spans and the token budget


def test_three_long_prompts_are_cut_by_the_budget() -> None:
    bench = Bench(num_blocks=160, block_size=64, max_num_seqs=3, budget=3200)
    for name, length in (("a", 3199), ("b", 3201), ("c", 3200)):
        bench.add(name, length)
    assert bench.spans() == [(0, 0, 3199), (1, 0, 1)]
    assert bench.spans() == [(0, 3199, 3200), (1, 1, 3200)]
    assert bench.spans() == [(0, 3200, 3201), (1, 3200, 3201), (2, 0, 3198)]


def test_a_chunk_that_is_not_the_last_chooses_no_token_and_ends_nothing() -> None:
    bench = Bench(budget=128)
    bench.add("a", 200, max_tokens=1)
    first = bench.step()
    assert [(span.start, span.count, span.sample) for span in first.spans] == [(0, 128, False)]
    assert bench.events == []
    second = bench.step()
    assert [(span.start, span.count, span.sample) for span in second.spans] == [(128, 72, True)]
    assert bench.ends("a")[0].finish_reason is FinishReason.LENGTH


def test_decodes_come_before_a_prompt_that_runs_and_before_one_that_waits() -> None:
    bench = Bench(budget=8)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 10)
    bench.add("c", 10)
    assert bench.spans() == [(0, 4, 5), (1, 0, 7)]
    assert bench.spans() == [(0, 5, 6), (1, 7, 10), (2, 0, 4)]
    assert bench.spans() == [(0, 6, 7), (1, 10, 11), (2, 4, 10)]


def test_a_running_prompt_without_budget_waits_in_its_place() -> None:
    bench = Bench(budget=2)
    bench.add("a", 2, max_tokens=4)
    bench.step()
    bench.add("b", 2, max_tokens=5)
    bench.add("c", 8)
    assert bench.spans() == [(0, 2, 3), (1, 0, 1)]
    assert bench.spans() == [(0, 3, 4), (1, 1, 2)]
    assert bench.spans() == [(0, 4, 5), (1, 2, 3)]
    assert bench.spans() == [(1, 3, 4), (0, 0, 1)]
    assert bench.spans() == [(1, 4, 5), (0, 1, 2)]


def test_with_a_budget_of_one_token_everyone_finishes() -> None:
    bench = Bench(budget=1)
    requests = [bench.add(name, 5, max_tokens=3) for name in "abcde"]
    bench.finish()
    assert [bench.tokens(r.request_id) for r in requests] == [bench.solo(r).tokens for r in requests]


def test_a_running_prompt_of_higher_priority_gets_the_budget_first() -> None:
    bench = Bench(budget=4)
    bench.add("a", 3, priority=5)
    bench.add("b", 20, priority=5)
    bench.step()
    bench.add("c", 20, priority=5)
    assert bench.spans() == [(0, 3, 4), (1, 1, 4)]
    bench.scheduler.abort("a")
    bench.scheduler.abort("b")
    bench.step()
    bench.add("urgent", 3)
    assert bench.spans() == [(0, 4, 8)]


@pytest.mark.parametrize("block_size", [1, 4, 32])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("budget", [1, 4, 64])
def test_lengths_around_block_and_chunk_borders(block_size: int, blocks: int, beside: int, budget: int) -> None:
    bench = Bench(block_size=block_size, budget=budget)
    requests = [bench.add(name, blocks * block_size + beside or 1, max_tokens=block_size + 2) for name in "ab"]
    again = [bench.add("a again", requests[0].tokens, max_tokens=block_size + 2)]
    bench.finish()
    for request in requests + again:
        assert bench.tokens(request.request_id) == bench.solo(request).tokens


# ---- the ends


def test_one_token_is_one_token() -> None:
    bench = Bench()
    request = bench.add("a", 5, max_tokens=1)
    bench.finish()
    assert (bench.tokens("a"), bench.ends("a")[0].finish_reason) == (bench.solo(request).tokens, FinishReason.LENGTH)
    assert len(bench.tokens("a")) == 1


def test_max_tokens_zero_only_scores_the_prompt() -> None:
    bench = Bench(budget=3)
    request = bench.add("a", 7, max_tokens=0, prompt_logprobs=2)
    plans = [bench.step(), bench.step(), bench.step()]
    assert not any(span.sample for plan in plans for span in plan.spans)
    (end,) = bench.ends("a")
    assert (end.finish_reason, bench.tokens("a")) == (FinishReason.LENGTH, ())
    scores = tuple(entry for event in bench.events for entry in event.prompt_logprobs)
    assert scores == bench.solo(request).prompt_logprobs
    assert len(scores) == 6
    bench.finish()


def test_the_context_limit_ends_a_request_with_length() -> None:
    bench = Bench(max_model_len=12)
    bench.add("a", 7)
    bench.finish()
    assert (len(bench.tokens("a")), bench.ends("a")[0].finish_reason) == (5, FinishReason.LENGTH)


def test_end_of_sequence_and_stop_ids_end_a_request() -> None:
    bench = Bench()
    expected = bench.solo(Request("a", [1, 2, 3], TokenRules(max_tokens=9))).tokens
    bench.add("eos", [1, 2, 3], max_tokens=9, eos_token_ids=(expected[2],))
    bench.add("stop", [1, 2, 3], max_tokens=9, stop_token_ids=(expected[4],))
    bench.finish()
    assert (bench.tokens("eos"), bench.ends("eos")[0].stop_reason) == (expected[:3], None)
    assert (bench.tokens("stop"), bench.ends("stop")[0].stop_reason) == (expected[:5], expected[4])
    assert bench.ends("eos")[0].finish_reason is bench.ends("stop")[0].finish_reason is FinishReason.STOP


def test_tokens_after_the_one_that_ends_a_request_are_dropped() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], stop_token_ids=(8,))
    plan = bench.scheduler.plan()
    bench.runner.execute(plan)
    (event,) = bench.scheduler.commit(plan, StepResult(plan.step, (SeqResult(0, (7, 8, 9)),)))
    assert (event.token_ids, event.finish_reason, event.stop_reason) == ((7, 8), FinishReason.STOP, 8)


def test_an_error_of_one_sequence_ends_only_that_one() -> None:
    bench = Bench()
    bench.add("bad", [1, 666, 3])
    good = bench.add("good", 5, max_tokens=6)
    bench.finish()
    (end,) = bench.ends("bad")
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, "the sequence holds the error token")
    assert bench.tokens("good") == bench.solo(good).tokens


def test_a_sequence_that_should_have_chosen_and_did_not_ends_with_an_error() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.add("b", 5)
    plan = bench.scheduler.plan()
    events = bench.scheduler.commit(plan, StepResult(plan.step, (SeqResult(0),)))
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]
    assert "chose no token" in str(events[0].error)


def test_fail_ends_a_request_with_the_message() -> None:
    bench = Bench()
    bench.add("a", 5)
    bench.step()
    assert bench.scheduler.fail("a", "the reason")
    assert not bench.scheduler.fail("a", "again")
    bench.finish()
    (end,) = bench.ends("a")
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, "the reason")


# ---- the prefix cache


def test_a_prompt_that_repeats_prompt_and_output_of_another_computes_one_token() -> None:
    bench = Bench(num_blocks=110, block_size=64, budget=6400)
    first = bench.add("a", 3200, max_tokens=200)
    while first.num_output < 129:
        bench.step()
    bench.add("b", first.tokens[:3329])
    assert bench.spans()[-1] == (1, 3328, 3329)
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (3200 + 3329, 3328)


def test_two_requests_that_compute_the_same_prompt_at_once_are_both_right() -> None:
    bench = Bench()
    requests = [bench.add(name, [5] * 9, max_tokens=12) for name in "ab"]
    third = bench.add("c", [5] * 9, max_tokens=12)
    assert bench.spans() == [(0, 0, 9), (1, 0, 9), (2, 0, 9)]
    bench.finish()
    assert {bench.tokens(r.request_id) for r in [*requests, third]} == {bench.solo(third).tokens}


def test_cached_tokens_are_reported_as_of_the_first_admission() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=2)
    bench.add("a", [5] * 9, max_tokens=1)
    bench.finish()
    bench.add("b", [7], max_tokens=20)
    bench.add("c", [5] * 9, max_tokens=20)
    cached_at_start = []
    while bench.scheduler.has_work():
        cached_at_start += [start.num_computed for start in bench.step().start if start.num_prompt == 9]
    assert cached_at_start == [8, 16]
    assert {event.num_cached_tokens for event in bench.events if event.request_id == "c"} == {8}


def test_what_an_aborted_request_computed_stays_cached() -> None:
    bench = Bench(budget=8)
    bench.add("a", [5] * 20)
    bench.step()
    bench.scheduler.abort("a")
    bench.add("b", [5] * 20)
    assert bench.spans() == [(0, 8, 16)]


def test_after_a_reset_nothing_is_reused() -> None:
    bench = Bench()
    bench.add("a", [5] * 20, max_tokens=1)
    bench.finish()
    bench.scheduler.reset_prefix_cache()
    bench.add("b", [5] * 20, max_tokens=1)
    assert bench.spans() == [(0, 0, 20)]


# ---- growth and preemption


def test_the_last_admitted_makes_room_and_comes_back_when_it_fits_whole() -> None:
    bench = Bench(num_blocks=102, block_size=64, max_num_seqs=2, budget=3200)
    first, second = bench.add("a", 3200, max_tokens=140), bench.add("b", 3200, max_tokens=140)
    assert bench.spans() == [(0, 0, 3200)]
    assert bench.spans() == [(0, 3200, 3201), (1, 0, 3199)]
    while bench.scheduler.num_preemptions == 0:
        plan = bench.step()
    # 51 blocks each, all taken: the token at position 3264 needs one more.
    assert [(span.slot, span.start, len(span.new_blocks)) for span in plan.spans] == [(0, 3264, 1)]
    assert (plan.release, plan.start) == ((1,), ())
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    while first.slot is not None:
        assert bench.step().start == ()
    bench.finish()
    for request in (first, second):
        assert bench.tokens(request.request_id) == bench.solo(request).tokens


def test_a_preempted_request_goes_on_where_it_was_and_repeats_nothing() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2)
    requests = [bench.add(name, 4, max_tokens=24, logprobs=1) for name in "ab"]
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    for request in requests:
        assert bench.tokens(request.request_id) == bench.solo(request).tokens
        assert request.num_prompt == 4


def test_the_lowest_priority_is_preempted_whoever_needs_the_room() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=2)
    low = bench.add("low", 3, priority=2)
    bench.step()
    high = bench.add("high", 7, priority=1)
    while bench.scheduler.num_preemptions == 0:
        plan = bench.step()
    assert (low.slot, high.slot) == (None, 1)
    assert [span.slot for span in plan.spans] == [1]
    assert low.tokens[low.num_prompt :] == list(bench.tokens("low"))


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, admission_age_limit=0)
    bench.add("a", 12, max_tokens=12)
    bench.add("b", 8, max_tokens=12)
    bench.step()
    bench.add("c", 5, max_tokens=3)
    started = []
    while bench.scheduler.has_work():
        started += [start.num_prompt for start in bench.step().start]
    assert bench.scheduler.num_preemptions == 1
    assert started == [8, 5]


def test_the_output_of_a_preempted_request_counts_toward_its_limits() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, caching=False)
    for name in "ab":
        bench.add(name, 4, max_tokens=24, min_tokens=24)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    assert [len(bench.tokens(name)) for name in "ab"] == [24, 24]


def test_prompt_logprobs_are_delivered_once_though_the_prompt_is_computed_twice() -> None:
    bench = Bench(num_blocks=8, budget=2, max_num_seqs=2, caching=False)
    first = bench.add("a", 2, max_tokens=28)
    bench.step()
    second = bench.add("b", 20, prompt_logprobs=0, max_tokens=2)
    bench.finish()
    assert bench.scheduler.num_preemptions > 0
    scores = tuple(entry for event in bench.events for entry in event.prompt_logprobs)
    assert scores == bench.solo(second).prompt_logprobs
    assert bench.tokens("a") == bench.solo(first).tokens


def test_a_request_that_outgrows_the_store_ends_at_the_same_token_in_any_company() -> None:
    alone, crowd = Bench(num_blocks=4), Bench(num_blocks=4)
    request = alone.add("a", 5)
    crowd.add("z", 3, max_tokens=11)
    crowd.add("a", 5)
    crowd.add("y", 6, max_tokens=8)
    alone.finish()
    crowd.finish()
    assert crowd.scheduler.num_preemptions > 0
    for bench in (alone, crowd):
        (end,) = bench.ends("a")
        assert end.finish_reason is FinishReason.ERROR
        assert "17 tokens need 5 blocks of 4, but there are 4" in str(end.error)
        assert bench.tokens("a") == bench.solo(request).tokens
        assert len(bench.tokens("a")) == 12


def test_growth_looks_ahead_if_there_is_room_but_never_beyond_the_last_token() -> None:
    bench = Bench(num_blocks=20, decode_blocks_ahead=2)
    bench.add("a", 4, max_tokens=16)
    bench.step()
    assert [len(bench.step().spans[0].new_blocks) for _ in range(15)] == [3] + [0] * 11 + [1] + [0] * 2
    bench.finish()


def test_looking_ahead_preempts_nobody() -> None:
    bench = Bench(num_blocks=5, decode_blocks_ahead=3, max_num_seqs=2)
    bench.add("a", 8, max_tokens=4)
    bench.add("b", 4, max_tokens=4)
    bench.finish()
    assert bench.scheduler.num_preemptions == 0


# ---- admission


def test_requests_are_admitted_by_priority_and_then_by_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    order = []
    requests = [bench.add(name, 3, priority=p, max_tokens=1) for name, p in (("d", 7), ("b", 0), ("a", -1), ("c", 0))]
    while bench.scheduler.has_work():
        before = len(bench.events)
        bench.step()
        order += [event.request_id for event in bench.events[before:]]
    assert order == ["a", "b", "c", "d"]
    assert len(requests) == 4


def test_a_head_that_does_not_fit_is_passed_over_a_limited_number_of_times() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=8, admission_age_limit=2)
    bench.add("runs", 16, max_tokens=60)
    bench.step()
    large = bench.add("large", 30, max_tokens=1)
    for name in "abcd":
        bench.add(name, 3, max_tokens=30)
        bench.step()
    assert large.times_passed_over == 2
    started = {name for name in "abcd" if bench.tokens(name)}
    assert started == {"a", "b"}


def test_nobody_is_passed_over_with_an_age_limit_of_zero() -> None:
    bench = Bench(num_blocks=10, admission_age_limit=0)
    bench.add("runs", 16)
    bench.step()
    bench.add("large", 30)
    bench.add("small", 3)
    bench.step()
    assert bench.tokens("small") == ()


def test_an_admission_leaves_a_block_for_each_running_request() -> None:
    bench = Bench(num_blocks=5)
    bench.add("a", 8)
    bench.add("b", 12, max_tokens=1)
    assert [start.slot for start in bench.step().start] == [0]
    bench.scheduler.abort("a")
    assert [start.slot for start in bench.step().start] == [0]


def test_a_slot_can_be_released_and_started_in_one_plan() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", 3, max_tokens=1)
    bench.add("b", 3, max_tokens=1)
    bench.step()
    plan = bench.step()
    assert (plan.release, [start.slot for start in plan.start]) == ((0,), [0])


def test_a_request_that_waits_too_long_for_its_start_ends_with_an_error() -> None:
    bench = Bench(max_num_seqs=1, queue_timeout=10)
    running = bench.add("runs", 3, max_tokens=20)
    bench.add("waits", 3)
    bench.step()
    bench.now = 10
    bench.step()
    assert bench.ends("waits") == []
    bench.now = 10.5
    bench.step()
    (end,) = bench.ends("waits")
    assert end.finish_reason is FinishReason.ERROR
    assert "waited too long: 10.5 s without being started (queue_timeout is 10 s)" in str(end.error)
    bench.finish()
    assert bench.tokens("runs") == bench.solo(running).tokens


def test_a_preempted_request_is_not_timed_out() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, queue_timeout=10)
    for name in "ab":
        bench.add(name, 4, max_tokens=24)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    bench.now = 1000
    bench.finish()
    assert [len(bench.tokens(name)) for name in "ab"] == [24, 24]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 5, "prompt is empty"),
        (20, 1, "the context holds 20"),
        (21, 0, "the context holds 20"),
        (17, 1, "17 tokens need 5 blocks of 4, but there are 4"),
        (16, 2, "17 tokens need 5 blocks of 4, but there are 4"),
    ],
)
def test_what_can_never_run_is_refused(prompt: int, max_tokens: int, message: str) -> None:
    bench = Bench(num_blocks=4, max_model_len=20)
    with pytest.raises(RequestError, match=message) as caught:
        bench.add("a", prompt, max_tokens=max_tokens)
    assert caught.value.param == "prompt"
    assert not bench.scheduler.has_work()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(16, 1), (16, 0), (15, 2)])
def test_what_just_fits_runs(prompt: int, max_tokens: int) -> None:
    bench = Bench(num_blocks=4, max_model_len=17)
    bench.add("a", prompt, max_tokens=max_tokens)
    bench.finish()
    assert (len(bench.tokens("a")), bench.ends("a")[0].finish_reason) == (max_tokens, FinishReason.LENGTH)


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=2)
    with pytest.raises(RequestError, match="'a' is in progress"):
        bench.add("a", 3)
    bench.finish()
    bench.add("a", 3, max_tokens=2)
    bench.finish()
    assert len(bench.ends("a")) == 2


# ---- abort


def _waiting(bench: Bench) -> None:
    for name in "uvwx":
        bench.add(name, 3)
    bench.step()
    bench.add("a", 3)


def _in_its_prompt(bench: Bench) -> None:
    bench.add("a", 200)
    bench.step()


def _decoding(bench: Bench) -> None:
    bench.add("a", 3)
    bench.step()
    bench.step()


def _preempted(bench: Bench) -> None:
    bench.add("u", 180)
    bench.add("a", 180)
    while bench.scheduler.num_preemptions == 0:
        bench.step()


@pytest.mark.parametrize("state", [_waiting, _in_its_prompt, _decoding, _preempted])
def test_an_abort_works_in_every_state_and_can_be_repeated(state: object) -> None:
    bench = Bench()
    state(bench)
    assert bench.scheduler.abort("a")
    assert not bench.scheduler.abort("a")
    bench.step()
    (end,) = bench.ends("a")
    assert (end.finish_reason, end.error) == (FinishReason.ABORT, None)
    for name in "uvwx":
        bench.scheduler.abort(name)
    bench.finish()
    assert len(bench.ends("a")) == 1
    assert bench.scheduler.num_blocks_used == 0


def test_an_abort_frees_slot_and_blocks_for_the_next_plan() -> None:
    bench = Bench(num_blocks=4, max_num_seqs=1)
    bench.add("a", 14)
    bench.step()
    bench.add("b", 14)
    bench.scheduler.abort("a")
    plan = bench.step()
    assert (plan.release, [start.slot for start in plan.start]) == ((0,), [0])


def test_an_abort_while_the_step_runs_drops_its_result() -> None:
    bench = Bench()
    bench.add("a", 3)
    other = bench.add("b", 3)
    plan = bench.scheduler.plan()
    result = bench.runner.execute(plan)
    bench.scheduler.abort("a")
    events = bench.scheduler.commit(plan, result)
    assert sorted((event.request_id, len(event.token_ids)) for event in events) == [("a", 0), ("b", 1)]
    bench.events += events
    bench.finish()
    assert bench.tokens("b") == bench.solo(other).tokens


def test_aborting_nobody_is_no_error() -> None:
    bench = Bench()
    assert not bench.scheduler.abort("never heard of")
    assert not bench.scheduler.has_work()


def test_waiting_events_can_be_taken_without_a_step() -> None:
    bench = Bench()
    bench.add("a", 3)
    bench.scheduler.abort("a")
    assert [event.finish_reason for event in bench.scheduler.take_events()] == [FinishReason.ABORT]
    assert not bench.scheduler.has_work()


# ---- guards


def test_work_is_left_until_the_runner_was_told_of_the_last_release() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=1)
    bench.step()
    assert bench.scheduler.has_work()
    plan = bench.step()
    assert (plan.release, plan.spans) == ((0,), ())
    assert not bench.scheduler.has_work()


def test_a_plan_must_be_committed_before_the_next_and_only_with_its_own_result() -> None:
    bench = Bench()
    bench.add("a", 3)
    plan = bench.scheduler.plan()
    with pytest.raises(RuntimeError, match="step 1 was planned, but not committed"):
        bench.scheduler.plan()
    with pytest.raises(RuntimeError, match="does not belong"):
        bench.scheduler.commit(plan, StepResult(plan.step + 1))
    bench.scheduler.commit(plan, bench.runner.execute(plan))
    with pytest.raises(RuntimeError, match="does not belong"):
        bench.scheduler.commit(plan, StepResult(plan.step))


def test_the_idle_check_names_a_leaked_block() -> None:
    bench = Bench()
    bench.kv.start(Request("leak", [1, 2, 3, 4, 5], TokenRules()), reserve=0)
    with pytest.raises(AssertionError, match=r"2 of 100 blocks are held: \[0, 1\]"):
        bench.scheduler.check_idle()


def test_the_counters_follow_what_runs() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", 5)
    bench.add("b", 5)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting, bench.scheduler.num_blocks_used) == (1, 1, 2)
