"""Prompts as callers write them, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.intake import check_token_ids
from paceline.engine.model_info import ModelInfo
from paceline.errors import RequestError
from paceline.text import chat_prompt


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
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """A conversation through the model's chat template. Raises RequestError (``messages``)."""
    if info.chat_template is None:
        raise RequestError(
            f"{info.name} has no chat template: use a raw prompt, or give a template with chat_template", "messages"
        )
    return chat_prompt.encode_chat(
        info.chat_template,
        info.tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_kwargs=template_kwargs,
    )
