"""The front of an engine, for callers that run on an asyncio loop.

The engine itself is at the other end of a link, on a thread or in a process of its own, and knows token ids alone.
Here are the texts, the streams, and the journal with which a lost engine is replaced: its successor goes on with every
sequence where its caller left off, and by the one rule that a sequence's tokens depend on nothing but itself the
answers are those that they would have been.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from paceline.config import EngineConfig
from paceline.engine.intake import Intake, accept
from paceline.engine.journal import Journal
from paceline.engine.links import EngineLink, Launcher
from paceline.engine.messages import (
    Abort,
    EngineFacts,
    EngineStats,
    FromEngine,
    Ping,
    Ready,
    ResetPrefixCache,
    StepBegins,
    StepEnds,
)
from paceline.engine.model_info import ModelInfo
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.prompts import encode_chat, encode_prompt
from paceline.engine.text_side import RequestUpdate, TextSide
from paceline.errors import ENGINE_LOST, ConfigError, EngineUnavailable, QueueFull, RequestError
from paceline.sampling_params import SamplingParams
from paceline.text.answer_parser import Thinking
from paceline.types import FinishReason, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

LOST_ENGINES = 5
"""Engines lost in a row without one step carried out, that end the sequences in flight; and, at the load, all hope."""
DRAIN_SECONDS = 0.02
"""How often it is looked whether the last request has ended, before other weights are loaded."""
RELAUNCH_SECONDS = 0.5
"""The wait before an engine is launched again that did not even load, doubled each time."""


class EngineState(StrEnum):
    """What a front can say of its engine.

    RECOVERING: it was lost, and its successor loads; requests are accepted and wait for it. SLEEPING: it was put to
    sleep, its memory is free; requests in flight wait, new ones are refused. LOADING: other weights take the place of
    the present ones; new requests are refused until they are there. FAILED: it cannot be brought back.
    """

    STOPPED = "stopped"
    RUNNING = "running"
    RECOVERING = "recovering"
    SLEEPING = "sleeping"
    LOADING = "loading"
    FAILED = "failed"


ModelLoader = Callable[[EngineConfig], tuple[ModelInfo, EngineConfig, EngineLink]]
"""Launches an engine for a model and describes it, as :func:`~paceline.engine.launch.load_model_process` does."""


class RequestStream:
    """The answer to one request: an asynchronous iterator of the deltas of all its choices.

    ``num_cached_tokens`` and ``prompt_logprobs`` are valid once the first delta has arrived. Leaving the iteration
    early does not stop the work; call :meth:`abort`, which is always safe.
    """

    def __init__(self, intake: Intake, engine: AsyncEngine) -> None:
        self.request_id = intake.request_id
        self.prompt_token_ids = intake.prompt_token_ids
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._engine = engine
        self._open_choices = len(intake.requests)
        self._updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self._open_choices == 0:
            raise StopAsyncIteration
        update = await self._updates.get()
        self.num_cached_tokens = update.num_cached_tokens
        self.prompt_logprobs = update.prompt_logprobs
        if update.delta.finish_reason is not None:
            self._open_choices -= 1
        return update.delta

    def abort(self) -> None:
        self._engine.abort(self.request_id)

    def deliver(self, update: RequestUpdate) -> None:
        self._updates.put_nowait(update)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One replacement of a lost engine: ``seconds`` from the loss until its successor was ready."""

    reason: str
    seconds: float
    num_resumed: int


class AsyncEngine:
    """Serves requests concurrently. Create it anywhere; :meth:`start` and the rest belong to one asyncio loop.

    >>> async with launch_engine(EngineConfig("smollm2-135m-instruct")) as engine:       # doctest: +SKIP
    ...     prompt = engine.encode_chat([{"role": "user", "content": "Hello!"}])
    ...     async for delta in await engine.submit(prompt, SamplingParams(max_tokens=40)):
    ...         print(delta.text, end="")

    Args:
        info: the model.
        config: the settings with which ``launch`` starts an engine; those that a first start has found out stay fixed,
            so that every successor has the same limits.
        link: an engine that is loaded or loading.
        launch: starts its successors.
        load: starts an engine for other weights; without it there can be none.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        link: EngineLink,
        launch: Launcher,
        load: ModelLoader | None = None,
    ) -> None:
        self._info = info
        self._asked = config
        self._config = config
        self._link = link
        self._launch = launch
        self._load = load
        self._is_loading = False
        self._seeds = random.Random(config.seed)
        self._journal = Journal()
        self._text = TextSide(info, self._drop)
        self._streams: dict[str, RequestStream] = {}
        self._stats = EngineStats()
        self._state = EngineState.STOPPED
        self._failure = ""
        self._is_ready = False
        self._settled = asyncio.Event()
        self._last_sign = 0.0
        self._lost_at: float | None = None
        self._lost_because = ""
        self._num_lost_in_a_row = 0
        self._keeper: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self.recoveries: list[Recovery] = []
        self.created = int(time.time())

    # ---- what the model is

    @property
    def model_name(self) -> str:
        return self._info.name

    @property
    def max_model_len(self) -> int:
        return self._info.max_model_len

    @property
    def max_logprobs(self) -> int:
        return self._info.max_logprobs

    @property
    def tokenizer(self) -> Any:
        return self._info.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template looks up, and so what a caller can tell it."""
        return frozenset() if self._info.chat_template is None else self._info.chat_template.variables

    @property
    def can_think(self) -> bool:
        return self._info.thinking is not None

    @property
    def default_params(self) -> Mapping[str, float | int]:
        return self._info.default_params

    @property
    def numerics(self) -> str:
        return self._info.numerics

    # ---- life

    async def start(self) -> None:
        """Take up the link; deltas are delivered on the running loop."""
        self._state = EngineState.RECOVERING
        self._last_sign = time.monotonic()
        await self._link.attach(self._receive)
        if self._link.can_be_killed and self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_watch())

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End every request with ``FinishReason.ABORT``, then the engine."""
        if self._state is EngineState.STOPPED:
            return
        self.abort_all()
        was, self._state = self._state, EngineState.STOPPED
        self._failure = ""
        self._settled.set()
        for task in (self._keeper, self._recovering):
            if task is not None:
                task.cancel()
        if was in (EngineState.RUNNING, EngineState.RECOVERING):
            await self._link.stop()

    @property
    def state(self) -> EngineState:
        return EngineState.LOADING if self._is_loading else self._state

    @property
    def is_healthy(self) -> bool:
        """Whether requests are answered, or will be without anybody's doing."""
        return self.state in (EngineState.RUNNING, EngineState.RECOVERING)

    def check_available(self) -> None:
        """Raises EngineUnavailable if requests are refused."""
        if not self.is_healthy:
            raise EngineUnavailable(f"the engine is {self.state}" + (f": {self._failure}" if self._failure else ""))

    @property
    def stats(self) -> EngineStats:
        """The engine's own, after its latest step."""
        return self._stats

    def in_flight(self) -> list[tuple[str, int, int, bool]]:
        """(id, prompt tokens, output tokens, whether it was in the latest step) of every sequence."""
        return self._journal.in_flight()

    async def sleep(self) -> None:
        """Give back the engine's memory. What is in flight waits, and goes on after :meth:`wake_up`."""
        if self.state is not EngineState.RUNNING:
            raise EngineUnavailable(f"the engine is {self.state}")
        self._state = EngineState.SLEEPING
        self._failure = "POST /wake_up brings it back"
        self._is_ready = False
        self._settled.clear()
        self._journal.step_begins(())
        self._journal.engine_lost()
        await self._link.stop()

    async def wake_up(self) -> None:
        """Load the model again. Returns once the engine runs. Raises EngineUnavailable if it does not sleep."""
        if self.state is not EngineState.SLEEPING:
            raise EngineUnavailable(f"the engine is {self.state}")
        self._state = EngineState.RECOVERING
        await self._relaunch()
        await self._settled.wait()
        self.check_available()

    async def load_weights(self, model: str, *, abort_running: bool = False) -> None:
        """Serve another model with the same settings in the present one's place, and wake up if need be.

        Requests in flight end with the weights that they began with, or are ended by ``abort_running``; new ones are
        refused meanwhile. The old weights are gone before the new ones come, so that memory need not hold both.

        Args:
            model: folder, ``.gguf`` file, alias or name, as ``EngineConfig.model``.

        Raises CheckpointError or ConfigError if it cannot be loaded; the old model is served again then. Raises
        EngineUnavailable in a state that allows no change, and while requests wait for a sleeping engine.
        """
        if self._load is None or self.state not in (EngineState.RUNNING, EngineState.SLEEPING, EngineState.FAILED):
            raise EngineUnavailable(f"no other weights can be loaded: the engine is {self.state}")
        if self._state is EngineState.SLEEPING and self._streams and not abort_running:
            raise EngineUnavailable(f"{len(self._streams)} requests wait for the sleeping engine; wake it up first")
        self._is_loading = True
        try:
            if abort_running:
                self.abort_all()
            while self._streams:
                await asyncio.sleep(DRAIN_SECONDS)
            await self._replace(self._load, replace(self._asked, model=model))
            await self._settled.wait()
        finally:
            self._is_loading = False
        self.check_available()

    async def _replace(self, load: ModelLoader, config: EngineConfig) -> None:
        if self._state is EngineState.RECOVERING:
            await self._settled.wait()
        if self._state is EngineState.STOPPED:
            return
        if self._state is EngineState.RUNNING:
            self._is_ready = False
            self._state = EngineState.SLEEPING
            await self._link.stop()
        self._settled.clear()
        try:
            info, found, link = await asyncio.to_thread(load, config)
        except BaseException:
            if self._state is not EngineState.STOPPED:
                self._state, self._failure = EngineState.RECOVERING, ""
                await self._relaunch()
            raise
        if self._state is EngineState.STOPPED:
            link.kill()
            return
        logger.info("%s takes the place of %s", info.name, self._info.name)
        self._info, self._asked, self._config, self._link = info, config, found, link
        self._text = TextSide(info, self._drop)
        self._num_lost_in_a_row, self._failure = 0, ""
        await self.start()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        if self._is_ready:
            self._link.send(ResetPrefixCache())

    # ---- requests

    def encode_prompt(
        self, prompt: str | Sequence[int], *, parse_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        """A raw prompt as ids: a text is tokenised by the tokenizer's own rules, ids are checked."""
        return encode_prompt(self._info, prompt, parse_special=parse_special, param=param)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template: ChatTemplate | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as ids, through ``template`` or the model's own. Raises RequestError (``messages``)."""
        return encode_chat(
            self._info,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template=template,
            template_kwargs=template_kwargs,
        )

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        thinking: Thinking = Thinking.OFF,
        shown_ids: frozenset[int] = frozenset(),
        model: ModelInfo | None = None,
        outputs: Sequence[Sequence[int]] = (),
        num_cached_tokens: int = 0,
    ) -> RequestStream:
        """Queue a request (see :func:`~paceline.engine.intake.accept`).

        Args:
            request_id: what :meth:`abort` knows it by; None makes one up.
            model: the :attr:`info` with which the prompt was made: it is refused if other weights have come since.
            outputs: the first tokens of each choice, if they are known from another time: they are delivered and not
                computed, so without log-probabilities. An early stop does not count them.
            num_cached_tokens: prompt tokens that the prefix cache saved, if ``outputs`` has any.

        Returns once it is accepted; raises RequestError, QueueFull or EngineUnavailable if it is not.
        """
        self.check_available()
        model = self._info if model is None else model
        request_id = uuid.uuid4().hex if request_id is None else request_id
        # Not on the loop: the tokenizer, which stop strings and bad words need, may be busy with a long prompt.
        intake = await asyncio.to_thread(
            accept,
            model,
            prompt_token_ids,
            params,
            request_id=request_id,
            seed_source=self._seeds,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            thinking=thinking,
            shown_ids=shown_ids,
        )
        self.check_available()
        if model is not self._info:
            raise EngineUnavailable("other weights were loaded while the request was prepared; send it again")
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id!r} is running", "request_id")
        self._check_queue(len(intake.requests))
        stream = RequestStream(intake, self)
        self._streams[request_id] = stream
        self._text.add(intake)
        self._journal.open(intake.requests)
        for request, tokens in zip(intake.requests, outputs, strict=False):
            for token in tokens:
                self._take(TokenEvent(request.request_id, (token,), num_cached_tokens=num_cached_tokens))
        self._send_due()
        return stream

    def draw_seed(self) -> int:
        """A seed for a request that brings none."""
        return self._seeds.getrandbits(63)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if none of this id runs. Safe to repeat."""
        choices = self._text.open_choices(request_id)
        for choice in choices:
            self._drop(choice)
        self._hand_out(self._text.update([TokenEvent(each, finish_reason=FinishReason.ABORT) for each in choices]))
        return bool(choices)

    def abort_all(self) -> None:
        for request_id in list(self._streams):
            self.abort(request_id)

    def _check_queue(self, num_new: int) -> None:
        """Raises QueueFull. Whoever can have a slot at once does not count as waiting."""
        most, slots = self._config.max_waiting, self._config.max_num_seqs
        waiting = len(self._journal) - slots
        if most is not None and waiting + num_new > most:
            raise QueueFull(
                f"{max(waiting, 0)} requests wait already, and {num_new} more would be too many (max_waiting is {most})"
            )

    # ---- the link

    def _receive(self, message: FromEngine | None) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, StepEnds):
            self._num_lost_in_a_row = 0
            self._stats = message.stats
            for event in message.events:
                self._take(event)
            if self._journal.has_due:
                self._send_due()
        elif isinstance(message, StepBegins):
            self._journal.step_begins(message.request_ids)
        elif isinstance(message, Ready):
            self._begin(message.facts)
        elif message is None:
            self._lose(self._link.ended_by())

    def _take(self, event: TokenEvent) -> None:
        self._journal.record(event)
        self._hand_out(self._text.update((event,)))

    def _begin(self, facts: EngineFacts) -> None:
        self._config = replace(self._config, max_model_len=facts.max_model_len, num_kv_blocks=facts.num_blocks)
        self._is_ready = True
        self._state = EngineState.RUNNING
        self._settled.set()
        if self._lost_at is not None:
            recovery = Recovery(self._lost_because, time.monotonic() - self._lost_at, len(self._journal))
            self._lost_at = None
            self.recoveries.append(recovery)
            logger.warning(
                "the engine is back after %.2f s; %d sequences go on", recovery.seconds, recovery.num_resumed
            )
        self._send_due()

    def _send_due(self) -> None:
        if self._is_ready:
            for submit in self._journal.take_due():
                self._link.send(submit)

    def _drop(self, choice_id: str) -> None:
        """Nobody wants this sequence any more."""
        self._journal.close(choice_id)
        if self._is_ready:
            self._link.send(Abort(choice_id))
        self._send_due()  # others may have waited for its probation to end

    def _hand_out(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue
            stream.deliver(update)
            if update.last:
                del self._streams[update.request_id]

    # ---- recovery

    def _lose(self, why: str) -> None:
        """The engine is gone, or has to go: launch its successor."""
        was_ready, self._is_ready = self._is_ready, False
        self._settled.clear()
        self._link.kill()
        self._state = EngineState.RECOVERING
        if self._lost_at is None:
            self._lost_at, self._lost_because = time.monotonic(), why
        logger.error("the engine was lost (%s); %d sequences wait for its successor", why, len(self._journal))
        given_up = self._journal.engine_lost()
        for choice in given_up:
            self._end_with_error(choice, f"{ENGINE_LOST} while it ran this request ({why})")
        self._num_lost_in_a_row = 0 if given_up else self._num_lost_in_a_row + 1
        if self._num_lost_in_a_row >= LOST_ENGINES:
            self._fail_all(f"{self._num_lost_in_a_row} engines were lost before they carried out a step ({why})")
            if not was_ready:
                self._state, self._failure = EngineState.FAILED, why
                self._settled.set()
                logger.error("no engine can be launched any more: %s", why)
                return
        wait = 0.0 if was_ready else RELAUNCH_SECONDS * 2.0**self._num_lost_in_a_row
        self._recovering = asyncio.create_task(self._relaunch(wait))

    async def _relaunch(self, wait: float = 0.0) -> None:
        await asyncio.sleep(wait)
        try:
            self._link = self._launch(self._config)
            self._last_sign = time.monotonic()
            await self._link.attach(self._receive)
        except (OSError, ConfigError) as error:
            self._lose(str(error))

    def _end_with_error(self, choice: str, message: str) -> None:
        self._journal.close(choice)
        self._hand_out(self._text.update([TokenEvent(choice, finish_reason=FinishReason.ERROR, error=message)]))

    def _fail_all(self, message: str) -> None:
        for choice, *_ in self._journal.in_flight():
            self._end_with_error(choice, message)

    async def _keep_watch(self) -> None:
        """Replace an engine that gives no sign of life within ``engine_timeout``; it answers pings between steps."""
        timeout = self._config.engine_timeout
        while True:
            await asyncio.sleep(timeout / 4)
            if self._state is not EngineState.RUNNING:
                continue
            if time.monotonic() - self._last_sign > timeout:
                self._lose(f"no sign of life for {timeout:g} s (engine_timeout)")
            else:
                self._link.send(Ping())
