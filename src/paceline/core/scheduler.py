"""Who computes what in the next step, and what became of it.

There is one mechanism: every running sequence has tokens, of which some are computed, and each step hands out spans of
the rest. A step's plan must be committed before the next one is made; anything else may be called in between.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.kv_manager import KvManager
from paceline.core.pace import Pace
from paceline.core.request import Request
from paceline.core.stop import Stop, find_stop
from paceline.errors import WAITED_TOO_LONG, RequestError
from paceline.types import (
    FinishReason,
    SeqResult,
    SeqSpan,
    SeqStart,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)

MISFITS_LOOKED_AT = 16
"""Waiting requests that one plan passes over because they do not fit: bounds the work when the store is full."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of :class:`~paceline.config.EngineConfig` that scheduling knows, under the same names.

    ``pair_cost`` is the model's: see :class:`~paceline.core.pace.Pace`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    queue_timeout: float | None = None
    admission_age_limit: int = 64
    decode_blocks_ahead: int = 0
    target_step_ms: float | None = None
    pair_cost: float = 0.0


class _Budget:
    """What a step has left for prompts: tokens, and work if streams wait for it."""

    def __init__(self, tokens: int, pace: Pace | None, decodes: Sequence[SeqSpan]) -> None:
        self._tokens = tokens - len(decodes)
        self._pace = pace if decodes else None
        self._room = 0.0 if self._pace is None else self._pace.room(decodes)

    @property
    def is_spent(self) -> bool:
        return self._tokens == 0 or (self._pace is not None and self._room < 1)

    def take(self, start: int, wanted: int) -> int:
        """Spend it on ``wanted`` tokens from position ``start`` on, or on fewer, but on one; it must not be spent."""
        count = min(self._tokens, wanted)
        if self._pace is not None:
            count = min(count, max(self._pace.fitting(start, self._room), 1))
            self._room -= self._pace.work(start, count)
        self._tokens -= count
        return count


class Scheduler:
    """Brings requests to their end, each exactly once.

    Not safe for use by several threads: one thread calls everything.

    Attributes:
        num_preemptions: running requests that had to make room so far.
        prefix_queries: tokens of all requests at their first admission.
        prefix_hits: those of them that the prefix cache spared.
    """

    def __init__(self, limits: SchedulerLimits, kv: KvManager, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.kv = kv
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._clock = clock
        target = limits.target_step_ms
        self._pace = None if target is None else Pace(target / 1000, limits.pair_cost)
        self._planned_at = 0.0
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._not_yet_started: deque[Request] = deque()
        self._free_slots = list(range(limits.max_num_seqs))
        self._released: list[int] = []
        self._events: list[TokenEvent] = []
        self._in_flight: StepPlan | None = None
        self._step = 0
        self._num_added = 0
        self._num_admissions = 0

    # ---- what it knows

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_blocks_used(self) -> int:
        return self.kv.num_used

    def has_work(self) -> bool:
        """Whether a step has anything to do: requests, slots to release, or events to deliver."""
        return bool(self._requests or self._released or self._events)

    def planned_ids(self, plan: StepPlan) -> tuple[str, ...]:
        """The requests that the last plan's spans belong to, as far as they live."""
        return tuple(self._running[span.slot].request_id for span in plan.spans if span.slot in self._running)

    def check_idle(self) -> None:
        """Raises AssertionError naming what leaked, if no request lives and yet a block or a slot is taken."""
        if self._requests:
            return
        if self.kv.num_used:
            raise AssertionError(
                f"no request lives, but {self.kv.num_used} of {self.kv.num_blocks} blocks are held: "
                f"{self.kv.used_blocks()}"
            )
        if len(self._free_slots) != self.limits.max_num_seqs:
            lost = sorted(set(range(self.limits.max_num_seqs)) - set(self._free_slots))
            raise AssertionError(f"no request lives, but these slots are taken: {lost}")

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError if its id is in use, if its prompt is empty or leaves no room in the context, or if prompt
        and first output token can never fit in the store.
        """
        self._check(request)
        self._num_added += 1
        request.number = self._num_added
        request.arrival = self._clock()
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_place_in_queue)
        if self.limits.queue_timeout is not None:
            self._not_yet_started.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if there is none. Its event comes with the next commit."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._cut_short(request, FinishReason.ABORT)
        return True

    def fail(self, request_id: str, message: str) -> bool:
        """The same as :meth:`abort`, with ``FinishReason.ERROR`` and a message."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._cut_short(request, FinishReason.ERROR, message)
        return True

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep what they use."""
        self.kv.reset()

    def take_events(self) -> list[TokenEvent]:
        """The events that wait for the next commit; it will not deliver them again."""
        events, self._events = self._events, []
        return events

    # ---- a step

    def plan(self) -> StepPlan:
        """Hand out the token budget: decodes first, then running prompts by rank, then new requests.

        Prompts get less of it beside decodes if the step would take longer than ``target_step_ms``.

        The plan may be without spans: then slots are to be released, or events wait for the commit.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} was planned, but not committed")
        self._step += 1
        self._end_overdue()
        preemptions_before = self.num_preemptions
        starts: list[SeqStart] = []
        spans: list[SeqSpan] = []
        running = sorted(self._running.values(), key=_rank)
        # The budget suffices for all decodes: each of them had a span in the last step, out of the same budget.
        for request in running:
            # Someone of higher rank may have taken its place meanwhile. It cannot have a span yet: rank goes down.
            if request.slot is not None and request.num_left == 1:
                new_blocks = self._grow(request)
                if new_blocks is not None:
                    spans.append(self._span(request, 1, new_blocks))
        budget = _Budget(self.limits.max_num_batched_tokens, self._pace, spans)
        for request in running:
            if not budget.is_spent and request.slot is not None and request.num_left > 1:
                spans.append(self._span(request, budget.take(request.num_computed, request.num_left)))
        # Whoever was just preempted has the better claim to what is free now.
        if self.num_preemptions == preemptions_before:
            self._admit(budget, starts, spans)
        released, self._released = self._released, []
        self._in_flight = StepPlan(self._step, tuple(released), tuple(starts), tuple(spans))
        self._planned_at = self._clock()
        return self._in_flight

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what the planned spans produced. Returns the news since the last commit.

        Results of requests that ended in between are ignored, and may be missing.
        """
        if self._in_flight is None or plan is not self._in_flight or result.step != plan.step:
            raise RuntimeError(f"the result of step {result.step} does not belong to the last plan")
        self._in_flight = None
        if self._pace is not None:
            self._pace.learn(plan.spans, self._clock() - self._planned_at)
        results = {seq.slot: seq for seq in result.seqs}
        for span in plan.spans:
            request = self._running.get(span.slot)
            if request is not None:
                self._commit_span(request, span, results.get(span.slot))
        return self.take_events()

    # ---- planning

    def _check(self, request: Request) -> None:
        prompt, most = request.num_prompt, self.limits.max_model_len
        if request.request_id in self._requests:
            raise RequestError(f"a request with the id {request.request_id!r} is in progress", "request_id")
        if prompt == 0:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        if prompt + min(request.rules.max_tokens, 1) > most:
            raise RequestError(
                f"the prompt has {prompt} tokens and needs room for its output, but the context holds {most}", "prompt"
            )
        # The last output token is never computed.
        needed = prompt + min(max(request.rules.max_tokens - 1, 0), 1)
        if self.kv.blocks_for(needed) > self.kv.num_blocks:
            raise RequestError(f"the prompt is too long: {self._arithmetic(needed)}", "prompt")

    def _end_overdue(self) -> None:
        timeout, queue = self.limits.queue_timeout, self._not_yet_started
        now = self._clock()
        while timeout is not None and queue:
            request = queue[0]
            lives = self._requests.get(request.request_id) is request and request.num_cached_tokens is None
            if lives and now - request.arrival <= timeout:
                break
            queue.popleft()
            if lives:
                self._cut_short(
                    request,
                    FinishReason.ERROR,
                    f"{WAITED_TOO_LONG}: {now - request.arrival:.1f} s without being started "
                    f"(queue_timeout is {timeout:g} s)",
                )

    def _grow(self, request: Request) -> tuple[int, ...] | None:
        """Blocks for the request's next token, at the expense of others if need be. None if it was itself preempted."""
        needed = request.num_computed + 1
        most = min(self.limits.max_model_len, request.num_prompt + request.rules.max_tokens) - 1
        ahead = max(min(self.limits.decode_blocks_ahead, self.kv.blocks_for(most) - self.kv.blocks_for(needed)), 0)
        while (new_blocks := self.kv.grow(request, needed, ahead)) is None:
            victim = max(self._running.values(), key=_rank)
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _span(self, request: Request, count: int, new_blocks: tuple[int, ...] = ()) -> SeqSpan:
        assert request.slot is not None
        sample = count == request.num_left and request.rules.max_tokens > 0
        return SeqSpan(request.slot, request.num_computed, count, new_blocks, sample)

    def _admit(self, budget: _Budget, starts: list[SeqStart], spans: list[SeqSpan]) -> None:
        """Start waiting requests in order while slots and budget last.

        A request needs all blocks of its tokens at once, and one more for each running sequence, so that those can go
        on for a while before anyone is preempted. One that does not fit may be passed over, a limited number of times.
        """
        admitted: list[Request] = []
        misfits: list[Request] = []
        num_passed_over = 0
        for request in self._waiting:
            if budget.is_spent or not self._free_slots or len(misfits) == MISFITS_LOOKED_AT:
                break
            if self.kv.start(request, reserve=len(self._running)):
                admitted.append(request)
                num_passed_over = len(misfits)
                starts.append(self._start(request))
                spans.append(self._span(request, budget.take(request.num_computed, request.num_left)))
            elif request.times_passed_over < self.limits.admission_age_limit:
                misfits.append(request)
            else:
                break
        for request in misfits[:num_passed_over]:
            request.times_passed_over += 1
        for request in admitted:
            self._leave_queue(request)

    def _start(self, request: Request) -> SeqStart:
        request.slot = heapq.heappop(self._free_slots)
        self._running[request.slot] = request
        self._num_admissions += 1
        request.admission = self._num_admissions
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.num_computed
        return SeqStart(
            slot=request.slot,
            tokens=tuple(request.tokens),
            num_prompt=request.num_prompt,
            num_computed=request.num_computed,
            blocks=tuple(request.blocks),
            rules=request.rules,
            adapter=request.adapter,
        )

    # ---- committing

    def _commit_span(self, request: Request, span: SeqSpan, result: SeqResult | None) -> None:
        if result is None or result.error is not None or (span.sample and not result.tokens):
            error = None if result is None else result.error
            self._cut_short(request, FinishReason.ERROR, error or f"step {self._step} chose no token for the sequence")
            return
        request.num_computed = span.start + span.count
        self.kv.publish(request)
        prompt_logprobs = _not_yet_scored(request, span, result)
        num_taken, stop = self._append(request, result)
        if stop is not None:
            self._remove(request)
        if stop is not None or num_taken or prompt_logprobs:
            event = TokenEvent(
                request_id=request.request_id,
                token_ids=result.tokens[:num_taken],
                logprobs=result.logprobs[:num_taken],
                prompt_logprobs=prompt_logprobs,
                finish_reason=None if stop is None else stop.reason,
                stop_reason=None if stop is None else stop.stop_reason,
                num_cached_tokens=request.num_cached_tokens or 0,
                num_likely=request.num_likely,
                error=None if stop is None else stop.error,
            )
            self._events.append(event)

    def _append(self, request: Request, result: SeqResult) -> tuple[int, Stop | None]:
        """Append chosen tokens up to the first that ends the sequence. Returns how many, and the end if it is one."""
        for count, token in enumerate(result.tokens, start=1):
            request.tokens.append(token)
            request.num_likely = request.num_likely + 1 if result.likely and result.likely[count - 1] else 0
            length = len(request.tokens)
            stop = find_stop(
                token,
                request.num_output,
                length,
                request.rules,
                self.limits.max_model_len,
                num_likely=request.num_likely,
                complete=result.complete and count == len(result.tokens),
            )
            if stop is not None:
                return count, stop
            if self.kv.blocks_for(length) > self.kv.num_blocks:
                # Even alone it could not go on; so it ends at the same token in every company.
                error = f"the sequence outgrew the key-value store: {self._arithmetic(length)}"
                return count, Stop(FinishReason.ERROR, error=error)
        if request.rules.max_tokens == 0 and request.num_left == 0:
            return 0, Stop(FinishReason.LENGTH)
        return len(result.tokens), None

    # ---- leaving

    def _cut_short(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._remove(request)
        self._events.append(
            TokenEvent(
                request_id=request.request_id,
                finish_reason=reason,
                num_cached_tokens=request.num_cached_tokens or 0,
                error=error,
            )
        )

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.slot is None:
            self._leave_queue(request)
        else:
            self._vacate(request)

    def _preempt(self, request: Request) -> None:
        """Back to its old place in the queue, with all its tokens, none of them computed."""
        self._vacate(request)
        insort(self._waiting, request, key=_place_in_queue)
        self.num_preemptions += 1

    def _vacate(self, request: Request) -> None:
        """Give back slot and blocks.

        Both may be handed out again by the next plan at the earliest moment: a plan releases before it starts, and one
        that is under way still owns what it writes, because nothing is handed out before it is committed.
        """
        assert request.slot is not None
        del self._running[request.slot]
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = None
        self.kv.free(request)

    def _leave_queue(self, request: Request) -> None:
        del self._waiting[bisect_left(self._waiting, _place_in_queue(request), key=_place_in_queue)]

    def _arithmetic(self, num_tokens: int) -> str:
        return (
            f"{num_tokens} tokens need {self.kv.blocks_for(num_tokens)} blocks of {self.kv.block_size}, "
            f"but there are {self.kv.num_blocks} (kv_cache_memory, num_kv_blocks)"
        )


def _place_in_queue(request: Request) -> tuple[int, int]:
    return request.priority, request.number


def _rank(request: Request) -> tuple[int, int]:
    """The largest is preempted first: of the lowest priority, the last admitted."""
    return request.priority, request.admission


def _not_yet_scored(request: Request, span: SeqSpan, result: SeqResult) -> tuple[TokenLogprobs, ...]:
    """The prompt log-probabilities that were not delivered before a preemption. The entries follow ``span.start``."""
    scores = result.prompt_logprobs[max(request.num_scored - span.start, 0) :]
    request.num_scored += len(scores)
    return scores
