"""Chat templates: from a conversation to the text that a model was trained on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError, RequestError
from paceline.text.folder_tokenizer import read_tokenizer_config
from paceline.text.jinja import MAX_OUTPUT_CHARS, TemplateEnvironment, TemplateTimeoutError
from paceline.text.messages import normalise_messages
from paceline.text.stand_ins import unused_characters
from paceline.text.tokenizer import Tokenizer

TIME_LIMIT = 5.0
"""Seconds that rendering one conversation may take."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""The names under which a model may give several templates."""


def load_chat_template(
    checkpoint: Checkpoint, tokenizer: Tokenizer, override: Path | None = None
) -> ChatTemplate | None:
    """The model's own template, or the Jinja file ``override``; None if there is neither.

    Raises CheckpointError for a template that cannot be read or is not valid Jinja.
    """
    if override is not None:
        sources, origin = {DEFAULT: _read_text(override)}, str(override)
    elif checkpoint.format is CheckpointFormat.GGUF:
        sources, origin = _gguf_sources(checkpoint), f"{checkpoint.path}: tokenizer.chat_template"
    else:
        sources, origin = _folder_sources(checkpoint.path)
    if not sources:
        return None
    if DEFAULT not in sources:
        raise CheckpointError(f"{origin}: none of the templates ({', '.join(sources)}) is named {DEFAULT!r}")
    return ChatTemplate(
        sources[DEFAULT],
        tool_source=sources.get(TOOL_USE),
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        origin=origin,
    )


class ChatTemplate:
    """A compiled template. Safe to use from several threads, one of which renders at a time.

    Args:
        source: Jinja text in the dialect of Hugging Face's templates.
        tool_source: another template for conversations with tools, if the model has one.
        origin: what errors call the template.
        time_limit: seconds that one rendering may take.

    Attributes:
        sources: the text of all its templates.
        variables: names that they look up, and so what a caller may set.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        origin: str = "chat template",
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self._environment = TemplateEnvironment()
        self._lock = threading.Lock()  # the deadline belongs to the environment
        self._time_limit = time_limit
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.sources = source + (tool_source or "")
        texts = (source,) if tool_source is None else (source, tool_source)
        try:
            self._template = self._environment.from_string(source)
            self._tool_template = None if tool_source is None else self._environment.from_string(tool_source)
            trees = map(self._environment.parse, texts)
            self.variables = frozenset[str]().union(*map(find_undeclared_variables, trees))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}: line {error.lineno}: {error.message}") from error
        except Exception as error:
            raise CheckpointError(f"{origin}: {error}") from error
        probe = next(unused_characters(self.sources))
        self._takes_parts = not self._shows(probe, probe) and self._shows(probe, [{"type": "text", "text": probe}])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation (see :func:`normalise_messages` for its form).

        With ``continue_final_message`` it ends exactly with the content of the last message, which must be the
        assistant's. ``kwargs`` are further variables of the template. Raises RequestError for wrong messages, and with
        the template's own words when it refuses them.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        for name in kwargs:
            if name in self._tokens or name == "messages":
                raise RequestError(f"chat_template_kwargs cannot set {name!r}", "chat_template_kwargs")
        conversation = normalise_messages(messages)
        variables = {**kwargs, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return self._render(conversation, variables)
        final = conversation[-1]
        if final["role"] != "assistant" or "tool_calls" in final:
            raise RequestError(
                "continue_final_message needs a last message with the role assistant and no tool calls",
                "continue_final_message",
            )
        # Whatever a template does to the content, it cannot change one unknown character: where that stands, the
        # content begins.
        marker = next(unused_characters(conversation, variables, self.sources))
        text = self._render([*conversation[:-1], {**final, "content": marker}], variables)
        begin = text.rfind(marker)
        if begin < 0:
            raise RequestError("the chat template does not show the last message", "continue_final_message")
        return f"{text[:begin]}{final['content']}"

    def _render(self, conversation: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        template = self._tool_template if self._tool_template and variables["tools"] else self._template
        if self._takes_parts:
            conversation = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in conversation]
        with self._lock:
            self._environment.deadline = time.monotonic() + self._time_limit
            try:
                return self._collect(template, {**variables, **self._tokens, "messages": conversation})
            except TemplateTimeoutError:
                raise RequestError(
                    f"the chat template took longer than {self._time_limit:g} s for these messages", "messages"
                ) from None
            except Exception as error:  # a template can fail in any way
                raise RequestError(f"the chat template refused the messages: {error}", "messages") from error

    def _collect(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces, length = [], 0
        for piece in template.generate(variables):
            self._environment.check_deadline()
            pieces.append(piece)
            length += len(piece)
            if length > MAX_OUTPUT_CHARS:
                raise jinja2.TemplateError(f"its text is longer than {MAX_OUTPUT_CHARS} characters")
        return "".join(pieces)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows the tools that it is given."""
        probe = next(unused_characters(self.sources))
        function = {"name": probe, "description": "", "parameters": {"type": "object", "properties": {}}}
        return self._shows(probe, "", tools=[{"type": "function", "function": function}])

    def _shows(
        self, probe: str, content: str | list[dict[str, str]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Whether the template can show content of this form, or tools, of which one contains the probe."""
        template = self._tool_template if self._tool_template and tools else self._template
        with self._lock:
            self._environment.deadline = time.monotonic() + self._time_limit
            variables = {"messages": [{"role": "user", "content": content}], "tools": tools}
            try:
                return probe in self._collect(template, {**variables, **self._tokens})
            except Exception:
                return False


def _gguf_sources(checkpoint: Checkpoint) -> dict[str, str]:
    sources = {}
    keys = {DEFAULT: "tokenizer.chat_template", TOOL_USE: f"tokenizer.chat_template.{TOOL_USE}"}
    for name, key in keys.items():
        source = checkpoint.metadata.get(key)
        if source is None:
            continue
        if not isinstance(source, str):
            raise CheckpointError(f"{checkpoint.path}: {key} must be a string")
        sources[name] = source
    return sources


def _folder_sources(folder: Path) -> tuple[dict[str, str], str]:
    """The templates of a folder by name, and where they were found. Newer places win."""
    for path in (folder / "chat_template.jinja", folder / "chat_template.json"):
        if path.is_file():
            text = _read_text(path)
            return {DEFAULT: text if path.suffix == ".jinja" else _template_in_json(text, path)}, str(path)
    origin = f"{folder / 'tokenizer_config.json'}: chat_template"
    value = read_tokenizer_config(folder).get("chat_template")
    if value is None:
        return {}, origin
    if isinstance(value, str):
        return {DEFAULT: value}, origin
    entries = value if isinstance(value, list) else [None]
    sources = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(f"{origin} must be a string or a list of objects with name and template")
        sources[name] = source
    return sources, origin


def _template_in_json(text: str, path: Path) -> str:
    try:
        source = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: must hold a JSON object with chat_template") from error
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template must be a string")
    return source


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
