"""Chat answers taken apart: the deltas of thinking, content and tool calls, as clients expect them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.engine.model_info import ModelInfo
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.tools import ToolChoice
from paceline.text.answer_formats import AnswerFormats, ToolFormat
from paceline.text.answer_parser import AnswerParser, Piece, Thinking
from paceline.types import FinishReason

ALPHABET = string.ascii_letters + string.digits


class Answer:
    """One choice's answer as it grows.

    Attributes:
        reasoning_tokens: output tokens between the tags of the thinking so far.
    """

    def __init__(self, info: ModelInfo, choice: ToolChoice, thinking: Thinking) -> None:
        formats = info.formats
        tools = formats.tools if choice.tools else None
        self._tools = tools
        self._parser: AnswerParser | None = None
        if tools is not None or formats.reasoning is not None:
            self._parser = AnswerParser(
                reasoning=formats.reasoning,
                thinking=thinking,
                tools=tools,
                names=choice.names,
                parallel=choice.parallel,
            )
        self._counter = ThinkingCounter(formats, thinking)

    @property
    def reasoning_tokens(self) -> int:
        return self._counter.count

    def deltas(self, delta: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """What the interface calls deltas, for one of the engine's."""
        self._counter.add(delta.token_ids)
        if self._parser is None:
            if delta.text:
                yield {"content": delta.text}
            return
        for piece in self._parser.push(delta.text):
            yield self._shape(piece)
        if delta.finish_reason is not None:
            for piece in self._parser.finish():
                yield self._shape(piece)

    def finish_reason(self, reason: FinishReason) -> str:
        calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if calls and reason is FinishReason.STOP else reason.value

    def _shape(self, piece: Piece) -> dict[str, Any]:
        if piece.reasoning:
            return {"reasoning_content": piece.reasoning}
        if piece.call is None:
            return {"content": piece.content}
        if piece.name is None:
            return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.arguments}}]}
        assert self._tools is not None
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.call, "id": call_id(self._tools), "type": "function", "function": function}
        return {"tool_calls": [call]}


def call_id(tools: ToolFormat) -> str:
    return tools.id_prefix + "".join(secrets.choice(ALPHABET) for _ in range(tools.id_length))


def join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message of a whole answer."""
    message["content"] += delta.get("content", "")
    if "reasoning_content" in delta:
        message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            call = {"id": part["id"], "type": part["type"], "function": dict(part["function"])}
            message.setdefault("tool_calls", []).append(call)
        else:
            message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]


class ThinkingCounter:
    """Counts the tokens of the thinking, without its tags."""

    def __init__(self, formats: AnswerFormats, thinking: Thinking) -> None:
        self.count = 0
        self._begin = list(formats.think_begin)
        self._end = list(formats.think_end)
        self._seen: list[int] = []
        self._over = formats.reasoning is None or thinking is Thinking.OFF
        self._open = thinking is Thinking.OPEN

    def add(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._over:
                return
            self._seen.append(token)
            if not self._open:
                self._over = self._seen != self._begin[: len(self._seen)]
                self._open = self._seen == self._begin
                continue
            self.count += 1
            if self._seen[-len(self._end) :] == self._end:
                self.count -= len(self._end)
                self._over = True
