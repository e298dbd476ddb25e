"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.openai.json_text import to_json
from paceline.api.openai.logprobs import token_name
from paceline.api.openai.prompts import encode_messages, encode_texts
from paceline.api.openai.requests import DetokenizeBody, TokenizeBody, parse_body
from paceline.api.openai.service import Service
from paceline.errors import RequestError


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a raw prompt or of a conversation, as the completions routes would see them."""
    body = parse_body(TokenizeBody, await service.read_object(request))
    service.served_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is None:
        tokens = await encode_messages(service, body)
    else:
        [tokens] = await encode_texts(
            service, [body.prompt], add_special=body.add_special_tokens, parse_special=body.parse_special
        )
    answer = {"count": len(tokens), "max_model_len": service.engine.max_model_len, "tokens": tokens, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [token_name(service.engine.tokenizer, token) for token in tokens]
    return Response(to_json(answer), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = DetokenizeBody.model_validate(await service.read_object(request))
    service.served_name(body.model)
    if not isinstance(body.tokens, list):
        raise RequestError("tokens must be a list of token ids", "tokens")
    tokens = service.engine.encode_prompt(body.tokens, param="tokens")
    text = await asyncio.to_thread(service.engine.tokenizer.decode, tokens, skip_special=False)
    return Response(to_json({"prompt": text}), media_type="application/json")
