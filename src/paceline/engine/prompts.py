"""Prompts as callers write them, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.engine.intake import check_token_ids
from paceline.engine.model_info import ModelInfo
from paceline.errors import RequestError
from paceline.text import chat_prompt
from paceline.text.answer_parser import Thinking
from paceline.text.messages import normalise_messages

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate

PROMPT_TAIL = 32
"""Tokens at the end of a prompt that tags are looked for in."""


def encode_prompt(
    info: ModelInfo, prompt: str | Sequence[int], *, parse_special: bool = True, param: str = "prompt"
) -> list[int]:
    """A raw prompt: a text is tokenised by the tokenizer's own rules, control tokens in it included unless
    ``parse_special`` is off; ids are checked. Raises RequestError naming ``param``."""
    if isinstance(prompt, str):
        return info.tokenizer.encode(prompt, add_special=True, parse_special=parse_special)
    return check_token_ids(param, prompt, info)


def encode_chat(
    info: ModelInfo,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template: ChatTemplate | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """A conversation through ``template``, or else the model's own. Raises RequestError (``messages``)."""
    template = template or info.chat_template
    if template is None:
        raise RequestError(
            f"{info.name} has no chat template: use a raw prompt, or give a template with chat_template", "messages"
        )
    return chat_prompt.encode_chat(
        template,
        info.tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )


def thinking_after(
    info: ModelInfo, prompt_token_ids: Sequence[int], continued: Sequence[Mapping[str, Any]] | None = None
) -> Thinking:
    """What a conversation's prompt says of the thinking of the answer.

    The template's own last words tell it: they leave a thinking part open, or close it. Only where the final message
    of ``continued`` goes on, that message does.
    """
    reasoning = info.formats.reasoning
    if reasoning is None:
        return Thinking.OFF
    text = info.tokenizer.decode(prompt_token_ids[-PROMPT_TAIL:], skip_special=False).rstrip()
    if continued:
        final = str(normalise_messages(continued)[-1]["content"])
        if reasoning.begin in final or reasoning.end in final:
            opens = final.rfind(reasoning.begin) > final.rfind(reasoning.end)
            return Thinking.OPEN if opens else Thinking.OFF
        if final.strip():
            return Thinking.OFF
    if text.endswith(reasoning.begin):
        return Thinking.OPEN
    if text.endswith(reasoning.end):
        return Thinking.OFF
    return Thinking.OPEN if reasoning.always else Thinking.POSSIBLE
