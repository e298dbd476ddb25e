"""Server-sent events, and work that ends when its client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.openai.errors import as_api_error, error_body, internal_error
from paceline.api.openai.json_text import to_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):  # noqa: N818  (not an error of anybody's)
    """The client closed the connection: there is nobody to answer."""


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes; raises ClientGone then.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends ``events`` as they come. The status waits for the first of them, so that what fails before has its own.

    A later failure is one last event with the error. Empty events are not sent. When the client goes, ``events`` is
    closed.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], ping_interval: float | None = None) -> None:
        super().__init__()
        self._events = events if ping_interval is None else _with_pings(events, ping_interval)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await unless_client_leaves(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    if not data:
                        continue
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not started:
                raise
            failure = as_api_error(error)
            if failure is None:
                logger.exception("a stream failed")
                failure = internal_error()
            await send({"type": "http.response.body", "body": event(error_body(failure)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_pings(events: AsyncGenerator[bytes, None], interval: float) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        while True:
            following = asyncio.ensure_future(_next(events))
            try:
                while not (await asyncio.wait((following,), timeout=interval))[0]:
                    yield PING
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            data = following.result()
            if data is None:
                return
            yield data


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
