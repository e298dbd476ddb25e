"""The engine's side of the messages: carry out what has come, make a step, tell the news."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable

from paceline.engine.engine import Engine
from paceline.engine.messages import (
    Abort,
    EngineStats,
    FromEngine,
    Ping,
    Pong,
    ResetPrefixCache,
    StepBegins,
    StepEnds,
    Stop,
    Submit,
    ToEngine,
)
from paceline.errors import RequestError
from paceline.types import FinishReason, TokenEvent

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[ToEngine]


class EngineLoop:
    """Drives an engine by messages. Commands are carried out between steps; ``send`` takes what there is to tell."""

    def __init__(self, engine: Engine, inbox: Inbox, send: Callable[[FromEngine], None]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._in_step: tuple[str, ...] = ()
        self._refused: list[TokenEvent] = []
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_computed = 0

    def run(self) -> None:
        """Until :class:`Stop` comes. Whatever a step raises ends it, too."""
        while self._carry_out_commands():
            if self._engine.has_work:
                self._step()
            elif self._refused:
                self._tell([])

    def _carry_out_commands(self) -> bool:
        """Take what is in the inbox; without work, sleep until there is something. False once it is to stop."""
        idle = not self._engine.has_work
        while idle or not self._inbox.empty():
            message = self._inbox.get()
            idle = False
            if isinstance(message, Stop):
                return False
            self._carry_out(message)
        return True

    def _carry_out(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            try:
                self._engine.add(message.to_request())
            except RequestError as error:
                # The front has checked it, with the limits of this very engine.
                logger.error("the request %s was refused behind the front: %s", message.request_id, error)
                self._refused.append(TokenEvent(message.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id)
        elif isinstance(message, ResetPrefixCache):
            self._engine.scheduler.reset_prefix_cache()
        elif isinstance(message, Ping):
            self._send(Pong())

    def _step(self) -> None:
        plan = self._engine.plan()
        in_step = self._engine.scheduler.planned_ids(plan)
        if in_step != self._in_step:
            self._in_step = in_step
            self._send(StepBegins(in_step))
        begin = time.perf_counter()
        events = self._engine.run(plan)
        self._step_seconds += time.perf_counter() - begin
        self._num_steps += 1
        self._num_computed += sum(span.count for span in plan.spans)
        self._tell(events)

    def _tell(self, events: list[TokenEvent]) -> None:
        scheduler = self._engine.scheduler
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_used=scheduler.num_blocks_used,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            num_computed=self._num_computed,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )
        self._send(StepEnds((*self._refused, *events), stats))
        self._refused.clear()
