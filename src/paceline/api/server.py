"""The HTTP server: one application around one engine, and its life."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.middleware import ApiKeys, Errors, RequestIds
from paceline.api.openai.errors import ApiError, error_response
from paceline.api.openai.routes import openai_routes
from paceline.api.openai.service import Service
from paceline.api.openai.stream_journal import StreamJournal
from paceline.api.server_config import ServerConfig
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine.service import AsyncEngine

logger = logging.getLogger(__name__)

__all__ = ["ServerConfig", "build_app", "run_server"]

FAREWELL_SECONDS = 5
"""What requests that were ended at shutdown have to say so to their clients."""


def build_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application. The engine starts and stops with it."""
    journal = None if config.journal is None else StreamJournal(config.journal)
    service = Service(engine, config, journal=journal)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()
            if journal is not None:
                journal.close()

    # The framework's own pages about the interface would fetch scripts from elsewhere.
    app = FastAPI(
        title="Paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.service = service
    app.include_router(openai_routes(service))
    app.add_exception_handler(HTTPException, _refusal)
    if config.api_keys or config.admin_api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys, admin_keys=config.admin_api_keys)
    app.add_middleware(Errors)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIds)
    return app


async def _refusal(request: Request, error: Exception) -> Response:
    """The framework's own refusals in our shape: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=error.headers))


def run_server(engine: AsyncEngine, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    After the first one no connection is accepted any more. What runs may finish within ``shutdown_timeout``; the rest
    is ended with the finish reason ``abort``. Logging is left to the caller. Raises ConfigError if it cannot listen.
    """
    listener = _listen(config)
    app = build_app(engine, config)
    settings = uvicorn.Config(
        app,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + FAREWELL_SECONDS,
    )
    HttpServer(settings, app.state.service).run(sockets=[listener])


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}, port {config.port}: {error.strerror or error}") from None


class HttpServer(uvicorn.Server):
    """Ends what runs once it was told to stop and ``shutdown_timeout`` is over."""

    def __init__(self, settings: uvicorn.Config, service: Service) -> None:
        super().__init__(settings)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # Not the parent's: it would send the signal again after an orderly end, and the exit status would not be 0.
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            logger.info("serving %s on http://%s:%d", ", ".join(self._service.model_names), where, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = self._service.config.shutdown_timeout
        timer = asyncio.get_running_loop().call_later(patience, self._service.running.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
