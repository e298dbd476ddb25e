"""Settings of the HTTP server, beside those of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The names are those of the command line, with dashes there.

    Attributes:
        host: address to listen on; the default can be reached from this machine only.
        port: 0 takes a free one.
        api_keys: if any, every route but ``/health`` and ``/ping`` asks for one of them.
        served_model_names: names that the model answers to, the first being its own; empty takes the engine's.
        max_body_bytes: larger request bodies are refused.
        ping_interval: seconds without news after which a stream carries an empty comment, so that proxies keep it
            open; None sends none.
        shutdown_timeout: seconds that running requests have, once the server was told to stop, before they are ended.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    ping_interval: float | None = None
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}")
        if not all(self.api_keys):
            raise ConfigError("api_keys must not hold an empty key")
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
