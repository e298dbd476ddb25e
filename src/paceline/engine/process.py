"""The engine process: ``python -m paceline.engine.process FD``, started by :mod:`paceline.engine.links`.

It loads what the first message on the socket ``FD`` says, and serves until it is told to stop. When the other end of
the socket closes, because the front has ended or died, it ends at once, even in the middle of a step.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import BinaryIO

import msgspec

from paceline.engine.load import load_runtime
from paceline.engine.loop import EngineLoop, Inbox
from paceline.engine.messages import LENGTH, Failed, FromEngine, Launch, Ready, Stop, ToEngine, frame
from paceline.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


def serve(sock: socket.socket) -> int:
    """Load, and carry out what the front sends. Returns the process's exit status."""
    # Whoever stops the server stops the front, which ends this process in order; a group's signal must not.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source = sock.makefile("rb")
    launch = msgspec.msgpack.decode(_read_frame(source), type=Launch)
    logging.basicConfig(
        level=launch.log_level, stream=sys.stderr, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_fill, args=(source, inbox), name="paceline-inbox", daemon=True).start()

    def send(message: FromEngine) -> None:
        sock.sendall(frame(message))

    try:
        runtime = load_runtime(launch.config)
        send(Ready(runtime.facts))
        EngineLoop(runtime.engine, inbox, send).run()
    except (CheckpointError, ConfigError) as error:
        send(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        send(Failed(type(error).__name__, f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _fill(source: BinaryIO, inbox: Inbox) -> None:
    """Move messages from the socket to the inbox. The end of the socket is the end of the process."""
    try:
        while True:
            message = msgspec.msgpack.decode(_read_frame(source), type=ToEngine)
            inbox.put(message)
            if isinstance(message, Stop):
                return
    except (EOFError, OSError):
        os._exit(0)


def _read_frame(source: BinaryIO) -> bytes:
    size = LENGTH.unpack(_read_exactly(source, LENGTH.size))[0]
    return _read_exactly(source, size)


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return data


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
