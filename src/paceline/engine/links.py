"""How the front reaches an engine: on a thread of this process, or in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from paceline.config import EngineConfig
from paceline.engine.load import Runtime
from paceline.engine.loop import EngineLoop, Inbox
from paceline.engine.messages import (
    LENGTH,
    EngineFacts,
    Failed,
    FromEngine,
    Launch,
    Ready,
    Stop,
    ToEngine,
    frame,
)
from paceline.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "paceline.engine.process")
STOP_SECONDS = 3.0
"""What an engine has to end by itself before its process is killed."""
ENDING_SECONDS = 0.5
"""What a process has to end that has closed its socket already."""

Receive = Callable[[FromEngine | None], None]
"""Takes each message of an engine; None is the last, and says that the engine is gone."""


class EngineLink(Protocol):
    """One engine's life, from its launch to its end.

    ``can_be_killed`` tells whether a step that does not end can be ended from outside.
    """

    can_be_killed: bool

    async def attach(self, receive: Receive) -> None:
        """Have the messages delivered on the running loop, from now on."""

    def send(self, message: ToEngine) -> None: ...

    def kill(self) -> None:
        """End it at once, if that can be done; nothing is delivered any more. Safe to repeat."""

    async def stop(self) -> None:
        """End it in order; nothing is delivered any more."""

    def ended_by(self) -> str:
        """How an engine that is gone has ended, in words."""


Launcher = Callable[[EngineConfig], EngineLink]


class EngineThread:
    """An engine on a thread of this process. The thread alone touches scheduler and runner.

    ``load`` is called on it; what it gives is held no longer than the thread runs.
    """

    can_be_killed = False

    def __init__(self, load: Callable[[], Runtime]) -> None:
        self._load = load
        self._inbox: Inbox = Inbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Receive | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._error: str | None = None

    async def attach(self, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def kill(self) -> None:
        self._receive = None
        self._inbox.put(Stop())

    async def stop(self) -> None:
        self.kill()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def ended_by(self) -> str:
        return self._error or "its thread ended"

    def _run(self) -> None:
        try:
            runtime = self._take()()
            self._tell(Ready(runtime.facts))
            EngineLoop(runtime.engine, self._inbox, self._tell).run()
        except Exception as error:
            logger.exception("the engine failed")
            self._error = f"{type(error).__name__}: {error}"
        self._tell(None)

    def _take(self) -> Callable[[], Runtime]:
        """What loads, which may hold all weights and is not kept."""
        load = self._load
        del self._load
        return load

    def _tell(self, message: FromEngine | None) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, message)

    def _deliver(self, message: FromEngine | None) -> None:
        if self._receive is not None:
            self._receive(message)


class EngineProcess:
    """An engine in a process of its own, at the other end of a pair of sockets.

    It ends when this end is closed, however that comes about, so that it never outlives its front.
    """

    can_be_killed = True

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # A session of its own: a Ctrl-C in the terminal is for the front alone, which ends it in order.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._receive: Receive | None = None
        self._error: str | None = None
        self._ready: Ready | None = None
        self._socket.sendall(frame(Launch(config, logging.getLogger().getEffectiveLevel())))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> EngineFacts:
        """Block until the model is loaded. Raises CheckpointError or ConfigError if it cannot be."""
        try:
            message = _decode(_receive_exactly(self._socket, LENGTH.unpack(_receive_exactly(self._socket, 4))[0]))
        except EOFError:
            raise ConfigError(f"the engine process ended while it loaded the model: {self.ended_by()}") from None
        except BaseException:
            self.kill()
            raise
        if isinstance(message, Ready):
            self._ready = message
            return message.facts
        self.kill()
        assert isinstance(message, Failed)
        raise (CheckpointError if message.kind == CheckpointError.__name__ else ConfigError)(message.message)

    async def attach(self, receive: Receive) -> None:
        self._receive = receive
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        if self._ready is not None:
            receive(self._ready)
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, message: ToEngine) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def kill(self) -> None:
        self._receive = None
        if self._reading is not None:
            self._reading.cancel()
        self._process.kill()
        self._process.wait()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()

    async def stop(self) -> None:
        self._receive = None
        self.send(Stop())
        try:
            await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process %d did not end in %g s and was killed", self.pid, STOP_SECONDS)
        self.kill()

    def ended_by(self) -> str:
        try:
            code = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"process {self.pid}, {how}" + (f" ({self._error})" if self._error else "")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
                message = _decode(await reader.readexactly(size))
                if isinstance(message, Failed):
                    self._error = message.message
                elif self._receive is not None:
                    self._receive(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._receive is not None:
                self._receive(None)


def _decode(data: bytes) -> FromEngine:
    return msgspec.msgpack.decode(data, type=FromEngine)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Raises EOFError if the other end has closed."""
    pieces = bytearray()
    while len(pieces) < size:
        piece = sock.recv(size - len(pieces))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)
