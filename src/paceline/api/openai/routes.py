"""Every route of the interface, by its path."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from paceline.api.openai import info, tokens
from paceline.api.openai.chat import create_chat_completion
from paceline.api.openai.completions import create_completion
from paceline.api.openai.requests import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    UpdateWeightsBody,
)
from paceline.api.openai.resume import resume_stream
from paceline.api.openai.service import Service


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(service, request)

    @router.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    @router.post("/v1/abort", openapi_extra=_takes(AbortBody))
    async def abort(request: Request) -> Response:
        return await info.abort(service, request)

    @router.get("/v1/streams/{answer_id}")
    async def stream(answer_id: str, request: Request) -> Response:
        return resume_stream(service, request, answer_id)

    @router.get("/v1/models")
    async def models() -> Response:
        return info.list_models(service)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return info.show_model(service, name)

    @router.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        return await tokens.tokenize(service, request)

    @router.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return await tokens.detokenize(service, request)

    @router.get("/version")
    async def version() -> Response:
        return info.version(service)

    @router.get("/health")
    async def health() -> Response:
        return info.health(service)

    @router.post("/sleep")
    async def sleep() -> Response:
        return await info.sleep(service)

    @router.post("/wake_up")
    async def wake_up() -> Response:
        return await info.wake_up(service)

    @router.post("/update_weights_from_disk", openapi_extra=_takes(UpdateWeightsBody))
    async def update_weights(request: Request) -> Response:
        return await info.update_weights(service, request)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return info.reset_prefix_cache(service)

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        return info.health(service)

    return router


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """The body's schema for the OpenAPI document: the routes read it themselves, so that every error has our shape."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
