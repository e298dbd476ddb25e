"""What the routes share: the engine, the settings, the names of the model, and the requests that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from paceline.api.openai.errors import ApiError
from paceline.api.openai.json_text import parse_object
from paceline.api.server_config import ServerConfig, check_adapter_names
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.api.openai.stream_journal import StreamJournal
    from paceline.engine.service import AsyncEngine


class Running:
    """The requests in flight, by every name under which a caller may abort them."""

    def __init__(self) -> None:
        self._aborts: dict[str, Callable[[], None]] = {}
        self._at_shutdown: dict[str, Callable[[], None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._aborts

    @contextmanager
    def registered(
        self, names: set[str], abort: Callable[[], None], at_shutdown: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Until it is left, ``abort`` ends the request, and ``at_shutdown`` does when the server stops.

        Raises RequestError if a name is taken.
        """
        if taken := names & self._aborts.keys():
            raise RequestError(f"a request with the id {min(taken)!r} is running", "request_id")
        self._aborts.update(dict.fromkeys(names, abort))
        self._at_shutdown.update(dict.fromkeys(names, at_shutdown or abort))
        try:
            yield
        finally:
            for name in names:
                del self._aborts[name], self._at_shutdown[name]

    def abort(self, name: str) -> bool:
        """End a request; False if there is none of this name. Safe to repeat."""
        abort = self._aborts.get(name)
        if abort is None:
            return False
        abort()
        return True

    def end_all(self) -> None:
        """The server stops."""
        for end in list(self._at_shutdown.values()):
            end()


@dataclass(frozen=True)
class Service:
    engine: AsyncEngine
    config: ServerConfig
    running: Running = field(default_factory=Running)
    journal: StreamJournal | None = None

    def __post_init__(self) -> None:
        check_adapter_names(self.adapters, self.model_names)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.engine.model_name,)

    @property
    def identity(self) -> str:
        """Names all that may change a bit of an answer, but the request itself."""
        return f"{self.engine.model_name} {self.engine.numerics}"

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folders of the model's adapters, by the names of models that callers know them as."""
        return self.engine.info.adapters

    def served_name(self, asked: str | None) -> str:
        """The name that the answer carries. Raises ApiError 404 for a model that is not served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names and asked not in self.adapters:
            raise unknown_model(asked, (*self.model_names, *self.adapters))
        return asked

    def adapter_name(self, asked: str | None) -> str | None:
        """The adapter that a served name stands for; None if it is the model itself."""
        return asked if asked in self.adapters else None

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The JSON object in the request's body. Raises ApiError 413 and 415, RequestError."""
        media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(415, f"the body must be application/json, not {media_type[:60]!r}")
        limit = self.config.max_body_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        return parse_object(bytes(body))


def unknown_model(asked: str, served: tuple[str, ...]) -> ApiError:
    names = ", ".join(served)
    return ApiError(
        404, f"the model {asked[:200]!r} is not served here; there is {names}", param="model", code="model_not_found"
    )
