"""Prompts and conversations in a body, turned into token ids.

Tokenising and templates run on another thread: a long prompt must not hold up everyone's streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.api.openai.requests import MAX_SEQUENCES, ChatBody, TokenizeBody
from paceline.api.openai.service import Service
from paceline.errors import CheckpointError, RequestError
from paceline.text.stand_ins import strings_in

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate

Prompt = str | list[int]

TEMPLATE_FIELDS = {"enable_thinking": ("enable_thinking", "thinking"), "reasoning_effort": ("reasoning_effort",)}
"""Fields of ours to the variables by which templates know them."""


def split_prompts(prompt: Any) -> list[Prompt]:
    """The prompts in a completion's ``prompt``: a text, texts, token ids, or lists of token ids.

    Raises RequestError for anything else, mixtures and empty prompts included.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _not_a_prompt()
    # Of exactly these types: a boolean is no token id.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_SEQUENCES:
        raise RequestError(f"prompt may hold {MAX_SEQUENCES} prompts, not {len(prompt)}", "prompt")
    if kinds == {str} or (kinds == {list} and all(set(map(type, item)) <= {int} for item in prompt)):
        return prompt
    raise _not_a_prompt()


def _not_a_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
    )


async def encode_texts(
    service: Service, prompts: Sequence[Prompt], *, add_special: bool | None, parse_special: bool | None
) -> list[list[int]]:
    """Ids of raw prompts; None is the default, true, for both. Raises RequestError (``prompt``)."""
    engine, parse = service.engine, parse_special is not False

    def encode(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            _check_size(service, len(prompt.encode()), "prompt")
            if add_special is False:
                return list(engine.tokenizer.encode(prompt, add_special=False, parse_special=parse))
        return engine.encode_prompt(prompt, parse_special=parse, param="prompt")

    return await asyncio.to_thread(lambda: [encode(prompt) for prompt in prompts])


async def encode_messages(
    service: Service, body: ChatBody | TokenizeBody, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Ids of a conversation, through the model's template. Raises RequestError naming the field."""
    continues = bool(body.continue_final_message)

    def encode() -> list[int]:
        template = _own_template(service, body)
        _check_size(service, sum(len(text.encode()) for text in strings_in(body.messages)), "messages")
        _check_size(service, sum(len(text.encode()) for text in strings_in(tools)), "tools")
        return service.engine.encode_chat(
            body.messages,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            tools=list(tools) or None,
            template=template,
            template_kwargs=_template_kwargs(service, body, template),
        )

    return await asyncio.to_thread(encode)


def _own_template(service: Service, body: ChatBody | TokenizeBody) -> ChatTemplate | None:
    """The template that the request brings. Raises RequestError if such are not wanted here, or if it is no Jinja."""
    if body.chat_template is None:
        return None
    if not service.config.trust_request_chat_template:
        raise RequestError(
            "chat_template is not taken from requests here (the server's trust_request_chat_template allows it)",
            "chat_template",
        )
    from paceline.text.chat_template import ChatTemplate

    tokenizer = service.engine.tokenizer
    try:
        return ChatTemplate(
            body.chat_template, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or ""
        )
    except CheckpointError as error:
        raise RequestError(f"chat_template: {error}", "chat_template") from None


def _template_kwargs(service: Service, body: ChatBody | TokenizeBody, template: ChatTemplate | None) -> dict[str, Any]:
    """What the template is to know. Raises RequestError for a field of ours that it does not look at."""
    kwargs = dict(body.chat_template_kwargs or {})
    variables = service.engine.template_variables if template is None else template.variables
    for field, names in TEMPLATE_FIELDS.items():
        value = getattr(body, field)
        known = [name for name in names if name in variables]
        if value is None or (value is False and not service.engine.can_think):
            continue
        if not known:
            raise RequestError(f"{field} has no effect: the model's chat template does not know it", field)
        for name in known:
            if kwargs.setdefault(name, value) != value:
                raise RequestError(f"{field} and chat_template_kwargs differ", field)
    return kwargs


def _check_size(service: Service, num_bytes: int, param: str) -> None:
    """Tokenising megabytes takes seconds: what cannot fit is refused before."""
    # The exact limit takes a look at every token, so most texts are not measured by it.
    info = service.engine.info
    if num_bytes > info.max_model_len and num_bytes > info.max_prompt_bytes:
        raise RequestError(
            f"{param} is a text of {num_bytes} bytes, but the context holds {info.max_model_len} tokens "
            f"of together {info.max_prompt_bytes} bytes at most",
            param,
        )
