"""Failures as the client sees them: one body shape for every route and every kind of failure."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from paceline.api.openai.json_text import to_json
from paceline.errors import EngineUnavailable, QueueFull, RequestError

RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """A failure that ends an HTTP request: ``message`` for people, ``code`` for programs, ``param`` names the field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    body = to_json(error_body(error))
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError | None:
    """The answer to an exception that was raised on purpose; None for a defect of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), param=error.param, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
        )
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
    if isinstance(error, ValidationError):
        return _from_validation(error)
    return None


def is_temporary(error: Exception) -> bool:
    """Whether the same request may have more success later."""
    failure = as_api_error(error)
    return failure is not None and failure.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def internal_error() -> ApiError:
    """What a client is told of a defect of ours; the log has the rest."""
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


def _from_validation(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"{field} is required", param=field)
    message = str(first["msg"]).removeprefix("Input ")
    return ApiError(400, f"{field} {message[:1].lower()}{message[1:]}", param=field)
