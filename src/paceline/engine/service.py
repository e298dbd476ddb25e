"""The engine on a thread of its own, for callers that run on an asyncio loop.

The thread alone touches scheduler and runner. Commands reach it through a queue and are carried out between steps;
news go back to the loop in one call for each step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.engine.intake import Intake, accept
from paceline.engine.load import LoadedEngine
from paceline.engine.model_info import ModelInfo
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.prompts import encode_chat, encode_prompt
from paceline.engine.text_side import RequestUpdate, TextSide
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams
from paceline.text.answer_parser import Thinking
from paceline.types import TokenLogprobs

logger = logging.getLogger(__name__)

Command = Callable[[], None]


class RequestStream:
    """The answer to one request: an asynchronous iterator of the deltas of all its choices.

    ``num_cached_tokens`` and ``prompt_logprobs`` are valid once the first delta has arrived. Leaving the iteration
    early does not stop the work; call :meth:`abort`, which is always safe.
    """

    def __init__(self, intake: Intake, abort: Callable[[str], object]) -> None:
        self.request_id = intake.request_id
        self.prompt_token_ids = intake.prompt_token_ids
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._abort = abort
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
        self._abort(self.request_id)

    def deliver(self, update: RequestUpdate) -> None:
        self._updates.put_nowait(update)


class AsyncEngine:
    """Serves requests concurrently. Create it anywhere; :meth:`start` and the rest belong to one asyncio loop."""

    def __init__(self, loaded: LoadedEngine, *, seed: int | None = None) -> None:
        self._engine = loaded.engine
        self._info = loaded.info
        self._seeds = random.Random(seed)
        self._text = TextSide(loaded.info, loaded.engine.abort)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._stopping = False
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

    def start(self) -> None:
        """Start the thread; deltas are delivered on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve, name="paceline-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End every request with ``FinishReason.ABORT``, then the thread."""
        if self._thread is None:
            return
        for request_id in list(self._streams):
            self.abort(request_id)
        self._commands.put(self._stop_serving)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    @property
    def is_healthy(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failure is None

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
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as ids, through the model's chat template. Raises RequestError (``messages``)."""
        return encode_chat(
            self._info,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        thinking: Thinking = Thinking.OFF,
        shown_ids: frozenset[int] = frozenset(),
    ) -> RequestStream:
        """Queue a request (see :func:`~paceline.engine.intake.accept`).

        Returns once it is accepted; raises RequestError or QueueFull if it is not.
        """
        if self._failure is not None or self._thread is None:
            raise RuntimeError(f"the engine does not run: {self._failure or 'not started'}")
        # Not on the loop: the tokenizer, which stop strings and bad words need, may be busy with a long prompt.
        intake = await asyncio.to_thread(
            accept,
            self._info,
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
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id!r} is running", "request_id")
        stream = RequestStream(intake, self.abort)
        self._streams[request_id] = stream
        accepted: Future[None] = Future()
        self._commands.put(lambda: self._admit(intake, accepted))
        try:
            await asyncio.wrap_future(accepted)
        except BaseException:
            self.abort(request_id)
            self._streams.pop(request_id, None)
            raise
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if none of this id runs. Safe to repeat."""
        known = request_id in self._streams
        self._commands.put(lambda: self._cancel(request_id))
        return known

    # ---- the engine's thread

    def _admit(self, intake: Intake, accepted: Future[None]) -> None:
        if not accepted.set_running_or_notify_cancel():
            return  # the caller has gone meanwhile
        added: list[str] = []
        try:
            for request in intake.requests:
                self._engine.add(request)
                added.append(request.request_id)
        except Exception as error:
            for choice in added:
                self._engine.abort(choice)
            accepted.set_exception(error)
            return
        self._text.add(intake)
        accepted.set_result(None)

    def _cancel(self, request_id: str) -> None:
        for choice in self._text.open_choices(request_id):
            self._engine.abort(choice)

    def _serve(self) -> None:
        try:
            while not self._stopping or self._engine.has_work:
                self._run_commands(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._deliver(self._text.update(self._engine.step()))
        except Exception as error:
            logger.exception("the engine's thread failed")
            self._fail(f"the engine failed: {error}")

    def _run_commands(self, *, wait: bool) -> None:
        """Carry out what is in the queue; with ``wait``, sleep until there is something."""
        if wait and not self._stopping:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop_serving(self) -> None:
        self._stopping = True

    def _fail(self, message: str) -> None:
        """The thread cannot go on: end every stream with an error, so that no caller waits for ever."""
        self._failure = message
        self._deliver(self._text.fail_all(message))

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        if updates and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, updates)

    # ---- back on the loop

    def _hand_out(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue
            stream.deliver(update)
            if update.last:
                del self._streams[update.request_id]
