"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.openai.generation import AFTER_CHOICES, Generation, generating
from paceline.api.openai.json_text import parse_object, to_json
from paceline.api.openai.logprobs import (
    CompletionLogprobs,
    OffsetCounter,
    delta_logprobs,
    prompt_logprobs_by_id,
    prompt_offsets,
)
from paceline.api.openai.prompts import encode_texts, split_prompts
from paceline.api.openai.requests import CompletionBody, Wanted, parse_body, wanted
from paceline.api.openai.service import Service
from paceline.api.openai.stream_journal import Recording
from paceline.api.openai.streaming import DONE, EventStream, unless_client_leaves
from paceline.engine.outputs import ChoiceDelta
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.engine.service import RequestStream

DETOKENIZER_CONTEXT = 8
"""Prompt tokens that a detokenizer may want to have seen before the first new one."""

DEFAULT_MAX_TOKENS = 16
KIND, PREFIX = "text_completion", "cmpl"
UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "enable_thinking": (),
    "reasoning_effort": (),
}


async def create_completion(service: Service, request: Request) -> Response:
    completion = _Completion(service, await service.read_object(request))
    if completion.is_streamed:
        return EventStream(completion.events(), service.config.ping_interval)
    answer = await unless_client_leaves(request.receive, completion.answer())
    return Response(to_json(answer), media_type="application/json")


def resume_completion(service: Service, recording: Recording) -> EventStream:
    """What the client of a stream has not yet got of it."""
    completion = _Completion(service, parse_object(recording.stream.opened.body), recording)
    return EventStream(completion.events(), service.config.ping_interval)


def _wanted(service: Service, body: CompletionBody) -> Wanted[CompletionBody]:
    # With echo the prompt is a part of the text, and gets the logprobs that the text gets.
    return wanted(
        body,
        service.engine.default_params,
        max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        echoed_logprobs=body.logprobs if body.echo else None,
        scores=bool(body.echo) or body.prompt_logprobs is not None,
        spelt={},
    )


class _Completion:
    """Prompts to be continued, and the two forms of the answer."""

    def __init__(self, service: Service, fields: dict[str, Any], resumed: Recording | None = None) -> None:
        """Raises RequestError, ApiError and pydantic's ValidationError for fields that cannot be served."""
        body = parse_body(CompletionBody, fields, refuse=UNSUPPORTED_IN_COMPLETIONS)
        service.served_name(body.model)
        self._service = service
        self._asked = _wanted(service, body)
        self._body = body
        self._prompts = split_prompts(body.prompt)
        self._resumed = resumed
        self._info = service.engine.info
        self._encoded: list[list[int]] = []

    @property
    def is_streamed(self) -> bool:
        return bool(self._body.stream)

    async def _generating(self) -> AbstractAsyncContextManager[Generation]:
        self._encoded = await encode_texts(
            self._service,
            self._prompts,
            add_special=self._body.add_special_tokens,
            parse_special=self._body.parse_special,
        )
        return generating(self._service, self._asked, self._encoded, self._info, prefix=PREFIX, resumed=self._resumed)

    async def answer(self) -> dict[str, Any]:
        async with await self._generating() as generation:
            wholes: list[dict[str, Any]] = [{} for _ in range(len(self._prompts) * generation.num_choices)]
            async for piece in self._pieces(generation):
                _join(wholes[piece["index"]], piece)
            if self._body.prompt_logprobs is not None:
                for whole in wholes:
                    entries = generation.streams[whole["index"] // generation.num_choices].prompt_logprobs or ()
                    whole["prompt_logprobs"] = prompt_logprobs_by_id(
                        self._info.tokenizer, entries, self._body.prompt_logprobs
                    )
            return {**generation.head(KIND), "choices": wholes, "usage": generation.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The pieces of every choice, usage if asked for, and the end mark."""
        options = self._asked.options
        async with await self._generating() as generation:
            async for piece in self._pieces(generation):
                yield generation.event(piece["index"], generation.chunk(KIND, [piece], options))
            if options.include_usage:
                yield generation.event(AFTER_CHOICES, generation.chunk(KIND, [], options))
            yield DONE
            generation.finish()

    async def _pieces(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        choices: dict[int, _Choice] = {}
        async for index, delta in generation.deltas():
            if index not in choices:
                number = index // generation.num_choices
                stream, prompt = generation.streams[number], self._prompts[number]
                # A truncated prompt is no longer the text that it was made from.
                text = prompt if len(stream.prompt_token_ids) == len(self._encoded[number]) else None
                choices[index] = _Choice(
                    index, self._asked, self._info.tokenizer, stream, text if isinstance(text, str) else None
                )
                if self._body.echo:
                    yield choices[index].echo()
            yield choices[index].piece(delta)


class _Choice:
    """One choice as it grows: a sequence of pieces that join to the whole."""

    def __init__(
        self,
        index: int,
        asked: Wanted[CompletionBody],
        tokenizer: Tokenizer,
        stream: RequestStream,
        prompt: str | None,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._stream = stream
        self._prompt = prompt
        self._num_logprobs = asked.params.logprobs
        self._skip_special = asked.params.skip_special_tokens
        self._shows_ids = bool(asked.body.return_token_ids)
        self._length = 0
        self._offsets: OffsetCounter | None = None

    def echo(self) -> dict[str, Any]:
        """The prompt: as the caller wrote it, or decoded from the caller's ids."""
        tokens = self._stream.prompt_token_ids
        text, skip_special = self._prompt, False
        if text is None:
            skip_special = self._skip_special
            text = self._tokenizer.decode(tokens, skip_special=skip_special)
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = CompletionLogprobs()
            entries = self._stream.prompt_logprobs or []
            offsets = prompt_offsets(self._tokenizer, tokens, text, skip_special=skip_special)
            for token, entry, offset in zip_longest(tokens, entries[: len(tokens)], offsets):
                logprobs.add(self._tokenizer, token, entry, self._num_logprobs, offset)
        return self._shape(text, (), logprobs)

    def piece(self, delta: ChoiceDelta) -> dict[str, Any]:
        if self._num_logprobs is None:
            return self._shape(delta.text, delta.token_ids, None, delta)
        if self._offsets is None:
            tail = self._stream.prompt_token_ids[-DETOKENIZER_CONTEXT:]
            self._offsets = OffsetCounter(
                self._tokenizer, skip_special=self._skip_special, start=self._length, prompt_tail=tail
            )
        end = self._length + len(delta.text)
        logprobs = delta_logprobs(self._tokenizer, delta, self._num_logprobs, self._offsets, end)
        return self._shape(delta.text, delta.token_ids, logprobs, delta)

    def _shape(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: CompletionLogprobs | None,
        delta: ChoiceDelta | None = None,
    ) -> dict[str, Any]:
        piece: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None if logprobs is None else asdict(logprobs),
            "finish_reason": None if delta is None or delta.finish_reason is None else delta.finish_reason.value,
            "stop_reason": None if delta is None else delta.stop_reason,
        }
        if self._shows_ids:
            piece["token_ids"] = list(token_ids)
            if self._length == 0:
                piece["prompt_token_ids"] = list(self._stream.prompt_token_ids)
        self._length += len(text)
        return piece


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to a choice of the whole answer, which is empty at first."""
    if not whole:
        whole.update(piece)
        return
    whole["text"] += piece["text"]
    whole.update(finish_reason=piece["finish_reason"], stop_reason=piece["stop_reason"])
    for name, part in (piece["logprobs"] or {}).items():
        whole["logprobs"][name] += part
    if "token_ids" in piece:
        whole["token_ids"] += piece["token_ids"]
