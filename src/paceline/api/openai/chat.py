"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.openai.answers import Answer, join_delta
from paceline.api.openai.generation import AFTER_CHOICES, Generation, generating
from paceline.api.openai.json_text import parse_object, to_json
from paceline.api.openai.logprobs import chat_logprobs, prompt_logprobs_by_id
from paceline.api.openai.prompts import encode_messages
from paceline.api.openai.requests import ChatBody, Wanted, parse_body, structure_fields, wanted
from paceline.api.openai.service import Service
from paceline.api.openai.stream_journal import Recording
from paceline.api.openai.streaming import DONE, EventStream, unless_client_leaves
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.prompts import thinking_after
from paceline.engine.tools import ToolChoice, parse_tools, required_calls
from paceline.errors import RequestError

CHUNK, PREFIX = "chat.completion.chunk", "chatcmpl"
UNSUPPORTED_IN_CHAT = {"echo": (False,), "add_special_tokens": (False,), "parse_special": (False,)}


async def create_chat_completion(service: Service, request: Request) -> Response:
    chat = _Chat(service, await service.read_object(request))
    if chat.is_streamed:
        return EventStream(chat.events(), service.config.ping_interval)
    answer = await unless_client_leaves(request.receive, chat.answer())
    return Response(to_json(answer), media_type="application/json")


def resume_chat(service: Service, recording: Recording) -> EventStream:
    """What the client of a stream has not yet got of it."""
    chat = _Chat(service, parse_object(recording.stream.opened.body), recording)
    return EventStream(chat.events(), service.config.ping_interval)


def _wanted(service: Service, body: ChatBody, choice: ToolChoice) -> Wanted[ChatBody]:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    asked = wanted(
        body,
        service.engine.default_params,
        max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        scores=body.prompt_logprobs is not None,
        calls=required_calls(service.engine.info, choice),
        spelt={"logprobs": "top_logprobs", "prompt": "messages"},
    )
    if choice.tools and structure_fields(body):
        field = structure_fields(body)[0]
        raise RequestError(f"{field} and tools exclude each other, unless tool_choice is none", field)
    return asked


class _Chat:
    """One conversation to be continued, and the two forms of the answer."""

    def __init__(self, service: Service, fields: dict[str, Any], resumed: Recording | None = None) -> None:
        """Raises RequestError, ApiError and pydantic's ValidationError for fields that cannot be served."""
        body = parse_body(ChatBody, fields, refuse=UNSUPPORTED_IN_CHAT)
        service.served_name(body.model)
        choice = parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        asked = _wanted(service, body, choice)
        self._service = service
        self._choice = choice
        self._resumed = resumed
        self._answers: list[Answer] = []
        # What tokens brought whose text was held back, by choice.
        self._brought: list[dict[str, Any]] = [{} for _ in range(asked.params.n)]
        self._asked = asked
        self._body = body
        self._params = asked.params
        self._info = service.engine.info
        self._tokenizer = self._info.tokenizer

    @property
    def is_streamed(self) -> bool:
        return bool(self._body.stream)

    async def _generating(self) -> AbstractAsyncContextManager[Generation]:
        info = self._info
        tokens = await encode_messages(self._service, self._body, self._choice.tools)
        thinking = thinking_after(info, tokens, self._body.messages if self._body.continue_final_message else None)
        self._answers = [Answer(info, self._choice, thinking) for _ in range(self._params.n)]
        shown = info.formats.shown_ids(calls=bool(self._choice.tools))
        return generating(
            self._service, self._asked, [tokens], info, prefix=PREFIX, thinking=thinking, shown_ids=shown,
            resumed=self._resumed,
        )  # fmt: skip

    def _follow(self, generation: Generation) -> None:
        """Let the usage tell of the thinking."""
        if self._info.formats.reasoning is not None:
            generation.reasoning_tokens = lambda: sum(answer.reasoning_tokens for answer in self._answers)

    # ---- in one piece

    async def answer(self) -> dict[str, Any]:
        choices = [self._empty_choice(index) for index in range(self._params.n)]
        async with await self._generating() as generation:
            self._follow(generation)
            async for index, delta in generation.deltas():
                for piece in self._pieces(index, delta):
                    _join(choices[index], piece)
            for choice in choices:
                if choice["message"].get("tool_calls") and not choice["message"]["content"]:
                    choice["message"]["content"] = None
            stream = generation.streams[0]
            answer = {
                **generation.head("chat.completion"),
                "choices": choices,
                "usage": generation.usage(),
            }
            if self._params.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_logprobs_by_id(
                    self._tokenizer, stream.prompt_logprobs or (), self._params.prompt_logprobs
                )
            if self._body.return_token_ids:
                answer["prompt_token_ids"] = list(stream.prompt_token_ids)
            return answer

    def _empty_choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None if self._params.logprobs is None else chat_logprobs(self._tokenizer, (), 0),
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = []
        return choice

    # ---- in pieces

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Role, content and finish chunks of every choice, usage if asked for, and the end mark."""
        options = self._asked.options
        async with await self._generating() as generation:
            self._follow(generation)
            begun = False
            async for index, delta in generation.deltas():
                if not begun:
                    begun = True
                    for each, chunk in enumerate(self._role_chunks(generation)):
                        yield generation.event(each, chunk)
                for choice in self._pieces(index, delta):
                    yield generation.event(index, generation.chunk(CHUNK, [choice], options))
            if options.include_usage:
                yield generation.event(AFTER_CHOICES, generation.chunk(CHUNK, [], options))
            yield DONE
            generation.finish()

    def _role_chunks(self, generation: Generation) -> Iterator[dict[str, Any]]:
        for index in range(self._params.n):
            choice = _piece(index, {"role": "assistant", "content": ""})
            chunk = generation.chunk(CHUNK, [choice], self._asked.options)
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = list(generation.streams[0].prompt_token_ids)
            yield chunk

    def _pieces(self, index: int, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """A delta as the pieces of its text and one for its end; what its tokens bring goes with the first of them."""
        answer, brought = self._answers[index], self._brought[index]
        if self._params.logprobs is not None and delta.token_ids:
            logprobs = chat_logprobs(self._tokenizer, delta.logprobs, self._params.logprobs)
            if "logprobs" in brought:
                logprobs["content"] = brought["logprobs"]["content"] + logprobs["content"]
            brought["logprobs"] = logprobs
        if self._body.return_token_ids:
            brought["token_ids"] = brought.get("token_ids", []) + list(delta.token_ids)
        for part in answer.deltas(delta):
            yield {**_piece(index, part), **self._take_brought(index)}
        if delta.finish_reason is not None:
            end = {"finish_reason": answer.finish_reason(delta.finish_reason), "stop_reason": delta.stop_reason}
            yield {**_piece(index, {}), **self._take_brought(index), **end}

    def _take_brought(self, index: int) -> dict[str, Any]:
        brought, self._brought[index] = self._brought[index], {}
        return brought


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _join(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to a choice of the whole answer."""
    join_delta(choice["message"], piece["delta"])
    if piece["logprobs"] is not None:
        choice["logprobs"]["content"] += piece["logprobs"]["content"]
    if "token_ids" in piece:
        choice["token_ids"] += piece["token_ids"]
    if piece["finish_reason"] is not None:
        choice.update(finish_reason=piece["finish_reason"], stop_reason=piece["stop_reason"])
