"""Settings of the HTTP server, beside those of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The names are those of the command line, with dashes there.

    Attributes:
        host: address to listen on; the default can be reached from this machine only.
        port: 0 takes a free one.
        api_keys: if any, every route but ``/health`` and ``/ping`` asks for one of them.
        admin_api_keys: if any, what acts on everybody's requests asks for one of them: ``/sleep``, ``/wake_up``,
            ``/update_weights_from_disk`` and ``/reset_prefix_cache``.
        allowed_origins: web pages of other origins that browsers let in, such as ``https://example.org``; ``*`` is all
            of them. None by default.
        trust_request_chat_template: let requests bring a chat template of their own. Templates are programs: their
            loops have a time limit, but their memory has none.
        served_model_names: names that the model answers to, the first being its own; empty takes the engine's.
        max_body_bytes: larger request bodies are refused.
        ping_interval: seconds without news after which a stream carries an empty comment, so that proxies keep it
            open; None sends none.
        journal: file that notes the streams in progress, so that clients can have their rest after the server was
            started again: ``GET /v1/streams/ID``. It holds prompts and answers. None notes nothing.
        shutdown_timeout: seconds that running requests have, once the server was told to stop, before they are ended.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    ping_interval: float | None = None
    journal: Path | None = None
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}")
        for name, keys in (("api_keys", self.api_keys), ("admin_api_keys", self.admin_api_keys)):
            if not all(keys):
                raise ConfigError(f"{name} must not hold an empty key")
            if not all(key.isprintable() and " " not in key for key in keys):
                raise ConfigError(f"{name} must not hold spaces or control characters: a header has to carry them")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ConfigError(f"allowed_origins must be like https://example.org (or *), not {origin!r:.100}")
        if not all(self.served_model_names):
            raise ConfigError("served_model_names must not hold an empty name")
        if self.ping_interval is not None and not self.ping_interval > 0:
            raise ConfigError(f"ping_interval must be above 0 seconds, not {self.ping_interval}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout must be at least 0 seconds, not {self.shutdown_timeout}")


def check_adapter_names(adapters: Iterable[str], model_names: Iterable[str]) -> None:
    """Raises ConfigError for an adapter that has the name of the model: requests could not tell them apart."""
    if both := set(adapters) & set(model_names):
        raise ConfigError(f"lora: the model itself is served as {min(both)!r}; give the adapter another name")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with ``#`` are none. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"api_key_file: {path}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no key")
    return keys
