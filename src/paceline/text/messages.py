"""Conversations as callers write them, brought to the one form that templates are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """New messages whose content is a string and whose tool calls have their arguments as objects.

    ``developer`` is the newer name of ``system``, ``reasoning`` another of ``reasoning_content``. The parts of a
    content list are joined without a separator. Content may be absent or null beside tool calls only, and is then
    empty. Normalising twice changes nothing. Raises RequestError (``messages``) for what is not a conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [_normalise(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _normalise(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", "messages")
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    if "reasoning" in result:
        result.setdefault("reasoning_content", result["reasoning"])
    calls = _tool_calls(where, result.pop("tool_calls", None))
    if calls:
        result["tool_calls"] = calls
    result["content"] = _text(where, message.get("content"), optional=role == "assistant" and bool(calls))
    return result


def _text(where: str, content: object, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", "messages")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{where}.content[{index}] is of type {kind!r}: this model takes parts of type 'text' only", "messages"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{index}].text must be a string", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Calls with ``arguments`` as an object: on the wire they are a string of JSON, but templates expect the object."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", "messages")
    return [_tool_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function that has a name", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not valid JSON: {error}", "messages") from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be a JSON object", "messages")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
