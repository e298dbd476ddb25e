"""What every HTTP request passes on its way in: its id, the key, and the net under it."""

from __future__ import annotations

import hmac
import logging
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.openai.errors import ApiError, as_api_error, error_response, internal_error
from paceline.api.openai.streaming import ClientGone

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping"})
ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/update_weights_from_disk", "/reset_prefix_cache"})
"""What acts on everybody's requests."""
MAX_REQUEST_ID_CHARS = 256


class RequestIds:
    """``X-Request-Id``: the caller's, or one of ours, on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS
        request_id = given if usable else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Errors:
    """Turns whatever escapes into an answer of the one shape. A defect of ours is logged, never shown."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except (ClientGone, ClientDisconnect):
            pass  # nobody is there to be told
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            failure = as_api_error(error)
            if failure is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                failure = internal_error()
            await error_response(failure)(scope, receive, send)


class ApiKeys:
    """Lets in who shows one of the keys as ``Authorization: Bearer``, and everybody to the open paths.

    ``admin_keys`` are those for the administrator's paths, and open the others too; without any, ``keys`` do for all.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._admin_keys = [key.encode() for key in admin_keys or keys]
        self._keys = [key.encode() for key in (*keys, *admin_keys)] if keys else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            keys = self._admin_keys if scope["path"] in ADMIN_PATHS else self._keys
            if keys and not _shows_one_of(keys, scope):
                raise ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        await self._app(scope, receive, send)


def _shows_one_of(keys: Sequence[bytes], scope: Scope) -> bool:
    scheme, _, shown = Headers(scope=scope).get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(shown.strip().encode("latin-1"), key) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
