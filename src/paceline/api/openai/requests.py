"""The bodies that the routes accept.

Types are checked here, strictly: a boolean is no number and "5" is not 5. Ranges are checked where the values are
used, by :class:`~paceline.sampling_params.SamplingParams` and the engine. For every optional field null is the same as
absent.
Fields that are not listed are ignored, but for those in :mod:`~paceline.api.openai.unsupported`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from paceline.api.openai.structured import NAMES, respelt, structured_outputs
from paceline.api.openai.unsupported import UNSUPPORTED, refuse_unsupported
from paceline.errors import RequestError
from paceline.sampling_params import SamplingParams
from paceline.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
MAX_SEQUENCES = 1024
"""Prompts times choices of one HTTP request, at most."""
MAX_TEMPLATE_CHARS = 65536
"""Length of a chat template that a request brings, at most."""

_TEXT, _ID = {"type": "string"}, {"type": "integer"}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


# Fields of a form that is checked where they are used; these are the schemas of the OpenAPI document.
_Stop = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), {"type": "null"}]})]
_Words = Annotated[Any, WithJsonSchema({"anyOf": [_list_of(_TEXT), {"type": "null"}]})]
_Ids = Annotated[Any, WithJsonSchema({"anyOf": [_list_of(_ID), {"type": "null"}]})]
_Bias = Annotated[Any, WithJsonSchema({"type": ["object", "null"], "additionalProperties": {"type": "number"}})]
_Object = Annotated[Any, WithJsonSchema({"type": ["object", "null"]})]
_Schema = Annotated[Any, WithJsonSchema({"type": ["object", "string", "null"]})]
_Messages = Annotated[Any, WithJsonSchema(_list_of({"type": "object"}))]
_Prompt = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), _list_of(_ID), _list_of(_list_of(_ID))]})]
_Tools = Annotated[Any, WithJsonSchema({"anyOf": [_list_of({"type": "object"}), {"type": "null"}]})]
_Template = Annotated[str | None, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)]
_ToolChoice = Annotated[Any, WithJsonSchema({"type": ["string", "object", "null"]})]
_SWITCH = {"type": ["boolean", "null"]}
_Options = Annotated[
    dict[str, Any] | None,
    WithJsonSchema(
        {"type": ["object", "null"], "properties": {"include_usage": _SWITCH, "continuous_usage_stats": _SWITCH}}
    ),
]


_EarlyStop = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "properties": {"window": {"type": "integer", "minimum": 1}, "threshold": {"type": "number"}},
            "additionalProperties": False,
        }
    ),
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """``include_usage`` adds a last chunk with the usage; ``continuous_usage_stats`` adds it to every chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _Options = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: _Stop = None
    stop_token_ids: _Ids = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: _Words = None
    logit_bias: _Bias = None
    allowed_token_ids: _Ids = None
    early_stop: _EarlyStop = None
    reasoning_max_tokens: int | None = None
    thinking_token_budget: int | None = None
    prompt_logprobs: int | None = None
    temp_scaled_logprobs: bool | None = None
    top_p_normalized_logprobs: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: _Object = None
    structured_outputs: _Object = None
    guided_json: _Schema = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: _Words = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: _Schema = None
    json_schema: _Schema = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str | None, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] = None
    priority: Annotated[int | None, Field(ge=-(2**31), le=2**31 - 1)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: _Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: _Template = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: _Tools = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, Field(min_length=1, max_length=32)] = None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: _Prompt
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class TokenizeBody(Body):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: _Template = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str | None, Field(min_length=1, max_length=32)] = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(_list_of(_ID))]


class AbortBody(Body):
    """``POST /v1/abort``: the ``request_id`` that the caller gave, or the ``id`` of the answer."""

    request_id: str


class UpdateWeightsBody(Body):
    """``POST /update_weights_from_disk``: a folder, a ``.gguf`` file, an alias or a name, as ``serve`` takes it."""

    model_path: Annotated[str, Field(min_length=1)]
    abort_all_requests: bool | None = None


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(
    kind: type[BodyT], fields: Mapping[str, Any], *, refuse: Mapping[str, tuple[Any, ...]] | None = None
) -> BodyT:
    """The body in ``fields``. ``refuse`` lists what this route cannot serve, beside what none can.

    Raises RequestError and pydantic's ValidationError.
    """
    refuse_unsupported(fields, besides=refuse)
    if ignored := fields.keys() - kind.model_fields.keys() - UNSUPPORTED.keys():
        logger.debug("ignored fields: %s", ", ".join(sorted(ignored))[:200])
    return kind.model_validate(fields)


SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "early_stop", "reasoning_max_tokens", "prompt_logprobs",
    "temp_scaled_logprobs", "top_p_normalized_logprobs",
    "skip_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip


STRUCTURE_FIELDS = ("response_format", "structured_outputs", "guided_whitespace_pattern", *NAMES)


def structure_fields(body: GenerationBody) -> list[str]:
    """The fields of a body that ask for structured output."""
    structure, _ = structured_outputs({name: getattr(body, name) for name in STRUCTURE_FIELDS})
    given = [name for name in STRUCTURE_FIELDS if getattr(body, name) is not None]
    return given if structure is not None else []


WantedT = TypeVar("WantedT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class Wanted(Generic[WantedT]):
    """A checked body and what it comes to. ``spelt`` says what the caller calls a parameter of ``params``."""

    body: WantedT
    params: SamplingParams
    options: StreamOptions
    spelt: Mapping[str, str]

    def respelt(self, error: RequestError) -> RequestError:
        """The same error with the field as the caller spelt it."""
        return respelt(error, self.spelt)


def wanted(
    body: WantedT,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    scores: bool,
    echoed_logprobs: int | None = None,
    calls: StructuredOutputs | None = None,
    spelt: Mapping[str, str],
) -> Wanted[WantedT]:
    """Check what routes have in common.

    Args:
        defaults: the model's sampling defaults, for parameters that the body does not give.
        max_tokens: the route's default.
        logprobs: what the body asks for, however it says that.
        scores: the body asks for the prompt back, so an answer without new tokens makes sense.
        echoed_logprobs: likeliest tokens to be shown with an echoed prompt, beside ``prompt_logprobs``.
        calls: the form of an answer that has to be tool calls.
        spelt: names of the route's own for parameters.

    Raises RequestError.
    """
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        spelt = {**spelt, "max_tokens": "max_completion_tokens"}
    elif body.max_tokens is not None:
        max_tokens = body.max_tokens
    if body.thinking_token_budget is not None:
        if given.setdefault("reasoning_max_tokens", body.thinking_token_budget) != body.thinking_token_budget:
            raise RequestError(
                "reasoning_max_tokens and thinking_token_budget are two names of one field, and differ",
                "thinking_token_budget",
            )
        if body.reasoning_max_tokens is None:
            spelt = {**spelt, "reasoning_max_tokens": "thinking_token_budget"}
    if echoed_logprobs is not None:
        given["prompt_logprobs"] = _more(echoed_logprobs, given.get("prompt_logprobs"))
    structure, spelt_structure = structured_outputs({name: getattr(body, name) for name in STRUCTURE_FIELDS})
    if calls is not None:
        structure, spelt_structure = calls, {"structured_outputs.grammar": "tools", "structured_outputs": "tools"}
    given["structured_outputs"] = structure
    spelt = {**spelt, **spelt_structure}
    try:
        params = SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs})
        if params.max_tokens == 0 and not scores:
            raise RequestError("max_tokens must be at least 1, unless the prompt is to be scored", "max_tokens")
    except RequestError as error:
        raise respelt(error, spelt) from None
    if body.best_of is not None and body.best_of != params.n:
        raise RequestError(f"best_of must equal n ({params.n}) or be absent, not {body.best_of}", "best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported with stream: true", "prompt_logprobs")
    return Wanted(body, params, _stream_options(body), spelt)


def _more(first: int, second: int | None) -> int:
    """The larger of two numbers of likeliest tokens, of which -1 is all."""
    if second is None:
        return first
    return -1 if -1 in (first, second) else max(first, second)


def _stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise RequestError("stream_options is only for stream: true", "stream_options")
    return StreamOptions.model_validate(body.stream_options)
