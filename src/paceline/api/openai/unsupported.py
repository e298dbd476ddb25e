"""Fields that clients of this interface know, and that this server cannot serve: refused rather than ignored.

Every other field that is not ours is ignored, as the interface's own servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # Structured output
    "guided_decoding_backend": ("auto", "guidance"),
    "stop_regex": (),
    # Thinking
    "reasoning": (),
    "verbosity": (),
    # Other kinds of input and output
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "moderation": (),
    "suffix": ("",),
    "documents": ([],),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "mm_hashes": ([],),
    # Other ways to choose tokens
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words_token_ids": ([],),
    "logits_processors": ([],),
    "logits_processors_args": ({},),
    "vllm_xargs": ({},),
    "include_draft_logprobs": (False,),
    "include_logprobs_decode_token": (True,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (False,),
    "max_streaming_response_tokens": (1,),
    # Other ways to write the prompt
    "disable_chat_template": (False,),
    "prompt_token_ids": (),
    "completion_token_ids": (),
    # Adapters and transfer between engines
    "lora_request": (),
    "lora_adapter": (),
    "lora_path": (),
    "kv_transfer_params": (),
    "disaggregate_info": (),
}
"""Field to the values that ask for nothing; null is always one of them."""


def refuse_unsupported(body: Mapping[str, Any], *, besides: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """Raises RequestError naming the first field that asks for what cannot be served. ``besides`` adds fields."""
    table = {**UNSUPPORTED, **(besides or {})}
    for name, value in body.items():
        if name in table and value is not None and not _is_one_of(value, table[name]):
            raise RequestError(f"{name} is not supported", name)


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equal, and of the same kind: 0 is not False, but 1.0 is 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
