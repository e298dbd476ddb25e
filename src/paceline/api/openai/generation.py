"""One HTTP request's work in the engine: submitted as a whole, followed as one, ended as a whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.api.openai.errors import RETRY_AFTER_SECONDS, ApiError, is_temporary
from paceline.api.openai.json_text import to_json
from paceline.api.openai.requests import MAX_SEQUENCES, StreamOptions, Wanted
from paceline.api.openai.service import Service
from paceline.api.openai.stream_journal import Known, Opened, Recording, Stream, tokens_suffice
from paceline.api.openai.streaming import event
from paceline.engine.outputs import ChoiceDelta
from paceline.errors import ENGINE_LOST, GRAMMAR_FAILED, NO_TOKEN_LEFT, WAITED_TOO_LONG, RequestError
from paceline.text.answer_parser import Thinking
from paceline.types import FinishReason

if TYPE_CHECKING:
    from paceline.engine.model_info import ModelInfo
    from paceline.engine.service import RequestStream

AFTER_CHOICES = -1
"""What is sent after all choices, where a choice is asked for."""


class Generation:
    """The streams of one HTTP request, one for each prompt.

    Attributes:
        id: what the answer is called.
        created: seconds since 1970.
        model: the name the model was asked for by.
        numerics: names everything that may change a bit of the answer but the request itself.
        num_choices: of each prompt.
        streams: in the order of the prompts.
        reasoning_tokens: tells how many output tokens were thinking so far, for a route that knows.
        recording: what of it is written down, if it is a stream that can be taken up again.
    """

    def __init__(self, answer_id: str, created: int, model: str, numerics: str, num_choices: int) -> None:
        self.id = answer_id
        self.created = created
        self.model = model
        self.numerics = numerics
        self.num_choices = num_choices
        self.streams: list[RequestStream] = []
        self.reasoning_tokens: Callable[[], int] | None = None
        self.recording: Recording | None = None
        self._news: asyncio.Queue[tuple[int, ChoiceDelta] | Exception] = asyncio.Queue()
        self._followers: list[asyncio.Task[None]] = []
        self._num_open = 0
        self._aborted = False
        self._completion_tokens = 0

    def add(self, stream: RequestStream) -> None:
        """Follow the answer to the next prompt."""
        self._followers.append(asyncio.create_task(self._follow(len(self.streams), stream)))
        self.streams.append(stream)
        self._num_open += self.num_choices
        if self._aborted:
            stream.abort()

    async def deltas(self) -> AsyncIterator[tuple[int, ChoiceDelta]]:
        """(index of the choice in the answer, delta) of all prompts as they come; ends when all have finished.

        Raises ApiError if the engine cannot go on with one of them.
        """
        while self._num_open:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            prompt, delta = news
            if delta.finish_reason is FinishReason.ERROR:
                if delta.error == NO_TOKEN_LEFT:
                    raise ApiError(400, NO_TOKEN_LEFT, param="bad_words")
                if delta.error is not None and delta.error.startswith(GRAMMAR_FAILED):
                    raise ApiError(400, delta.error, param="structured_outputs")
                if delta.error is not None and delta.error.startswith(WAITED_TOO_LONG):
                    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
                    raise ApiError(503, delta.error, code="queue_timeout", headers=retry)
                if delta.error is not None and delta.error.startswith(ENGINE_LOST):
                    raise ApiError(500, delta.error, code="engine_lost")
                raise ApiError(500, delta.error or "the engine gave this request up", code="generation_failed")
            self._completion_tokens += len(delta.token_ids)
            self._num_open -= delta.finish_reason is not None
            choice = prompt * self.num_choices + delta.index
            if self.recording is not None:
                self.recording.note(choice, delta, [stream.num_cached_tokens for stream in self.streams])
            yield choice, delta

    def abort(self) -> None:
        """End what has not ended, in whatever state it is. Safe to repeat."""
        self._aborted = True
        if self._num_open:
            for stream in self.streams:
                stream.abort()

    def suspend(self) -> None:
        """End as :meth:`abort` does, or so that the client can have the rest another time, if it can."""
        if self.recording is None:
            self.abort()
        else:
            self._news.put_nowait(_suspended(self.id))

    def event(self, part: int, value: Any) -> bytes:
        """A server-sent event of a choice, or of what is sent after them; empty if the client has it."""
        return event(value) if self.recording is None else self.recording.event(part, value)

    def finish(self) -> None:
        """The client has everything."""
        if self.recording is not None:
            self.recording.end()

    def close(self) -> None:
        """Nobody listens any more: abort, and follow no longer."""
        self.abort()
        for follower in self._followers:
            follower.cancel()

    def head(self, kind: str) -> dict[str, Any]:
        """What every answer and chunk of this request begins with; ``kind`` is the interface's name of the object."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.numerics,
        }

    def chunk(self, kind: str, choices: list[dict[str, Any]], options: StreamOptions) -> dict[str, Any]:
        """A piece of a streamed answer. Only who asks for the usage sees the field, null but in the last chunk."""
        chunk = {**self.head(kind), "choices": choices}
        if options.include_usage:
            chunk["usage"] = self.usage() if options.continuous_usage_stats or not choices else None
        return chunk

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self.streams)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in self.streams)},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens()}
        return usage

    async def _follow(self, prompt: int, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                self._news.put_nowait((prompt, delta))
        except Exception as error:
            self._news.put_nowait(error)


def _suspended(answer_id: str) -> ApiError:
    return ApiError(
        503,
        f"the server stops; once it is back, GET /v1/streams/{answer_id} brings the rest",
        code="stream_suspended",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
    )


@asynccontextmanager
async def generating(
    service: Service,
    wanted: Wanted[Any],
    prompts: Sequence[Sequence[int]],
    info: ModelInfo,
    *,
    prefix: str,
    thinking: Thinking = Thinking.OFF,
    shown_ids: frozenset[int] = frozenset(),
    resumed: Recording | None = None,
) -> AsyncIterator[Generation]:
    """Submit the prompts; on leaving, for whatever reason, nothing of them runs on.

    ``info`` is the model that the prompts were made for; ``thinking`` and ``shown_ids`` are those of
    :func:`~paceline.engine.intake.accept`. ``resumed`` is what was written down of a stream that is taken up again.

    Raises RequestError and QueueFull if one of them is not accepted (then none is), EngineUnavailable.
    """
    service.engine.check_available()
    body, params = wanted.body, wanted.params
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} sequences; "
            f"one request may have {MAX_SEQUENCES}",
            "prompt" if params.n == 1 else "n",
        )
    own_id = uuid.uuid4().hex
    answer_id, created = f"{prefix}-{body.request_id or own_id}", int(time.time())
    recording = resumed
    if resumed is not None:
        answer_id, created = resumed.stream.opened.answer_id, resumed.stream.opened.created
    elif service.journal is not None and body.stream:
        opened = Opened(
            answer_id=answer_id,
            kind=prefix,
            body=to_json(body.model_dump(exclude_none=True)),
            created=created,
            seeds=tuple(service.engine.draw_seed() for _ in prompts),
            identity=service.identity,
            tokens_suffice=tokens_suffice(params),
            outputs=((),) * (len(prompts) * params.n),
        )
        recording = Recording(service.journal, Stream(opened))
    generation = Generation(answer_id, created, service.served_name(body.model), service.engine.numerics, params.n)
    generation.recording = recording
    names = {generation.id, body.request_id or generation.id}
    with service.running.registered(names, generation.abort, at_shutdown=generation.suspend):
        try:
            for index, prompt in enumerate(prompts):
                generation.add(
                    await _submit(
                        service, wanted, prompt, info, f"{prefix}-{own_id}-{index}", thinking, shown_ids,
                        None if recording is None else recording.stream.known(index, params.n),
                    )
                )  # fmt: skip
            if service.journal is not None and recording is not None and resumed is None:
                service.journal.open_stream(recording.stream)
            yield generation
        except Exception as error:
            if recording is not None and not is_temporary(error):
                recording.end()
            raise
        finally:
            generation.close()


async def _submit(
    service: Service,
    wanted: Wanted[Any],
    prompt: Sequence[int],
    info: ModelInfo,
    request_id: str,
    thinking: Thinking,
    shown_ids: frozenset[int],
    known: Known | None,
) -> RequestStream:
    body, params = wanted.body, wanted.params
    if known is not None and params.seed is None:
        params = replace(params, seed=known.seed)
    try:
        return await service.engine.submit(
            prompt,
            params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            adapter=service.adapter_name(body.model),
            thinking=thinking,
            shown_ids=shown_ids,
            model=info,
            outputs=() if known is None else known.outputs,
            num_cached_tokens=0 if known is None else known.num_cached_tokens,
        )
    except RequestError as error:
        raise wanted.respelt(error) from None
