"""A real server on a real socket, around an engine without weights."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from paceline.api.server import HttpServer, ServerConfig, build_app
from paceline.engine.engine import Runner
from paceline.engine.load import LoadedEngine
from paceline.engine.service import AsyncEngine
from paceline.types import StepPlan, StepResult
from support.served import served

PATIENCE = 20.0
"""Seconds after which a test that waits for something has failed."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass(frozen=True)
class LiveServer:
    port: int
    loaded: LoadedEngine
    engine: AsyncEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE)

    def send(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """One request, byte for byte as given: nothing is checked or repaired on the way out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            kind = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> Reply:
        return self.send("POST", path, fields)

    def begin(self, path: str, **fields: Any) -> socket.socket:
        """Send a request and do not wait for the answer."""
        data = json.dumps(fields).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection

    @property
    def num_live(self) -> int:
        """Sequences in the engine, running or waiting."""
        scheduler = self.loaded.engine.scheduler
        return scheduler.num_running + scheduler.num_waiting

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)


class SlowRunner:
    """Lets another runner work, but each step takes its time."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        self._runner = runner
        self._seconds = seconds

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self._seconds)
        return self._runner.execute(plan)


@contextmanager
def live_server(
    loaded: LoadedEngine,
    *,
    reload: Callable[[], LoadedEngine] | None = None,
    others: Mapping[str, Callable[[], LoadedEngine]] | None = None,
    max_waiting: int | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Serves until the block is left. ``settings`` are those of ServerConfig."""
    engine = served(loaded, reload, others, max_waiting=max_waiting)
    app = build_app(engine, ServerConfig(port=0, **settings))
    listener = socket.create_server(("127.0.0.1", 0))
    settings_of_http = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = HttpServer(settings_of_http, app.state.service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    live = LiveServer(listener.getsockname()[1], loaded, engine)
    try:
        live.wait_until(lambda: server.started)
        yield live
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"


def events(data: bytes) -> list[Any]:
    """The values of a stream's events; its end mark, and pings, as text."""
    pieces = data.decode().split("\n\n")
    assert pieces.pop() == "", "the last event is not complete"
    return [
        json.loads(piece.removeprefix("data: ")) if piece.startswith("data: {") else piece.removeprefix("data: ")
        for piece in pieces
    ]
