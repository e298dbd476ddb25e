"""``GET /v1/streams/{id}``: the rest of a stream whose connection, or whose server, was lost."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.openai.chat import PREFIX as CHAT
from paceline.api.openai.chat import resume_chat
from paceline.api.openai.completions import PREFIX as COMPLETION
from paceline.api.openai.completions import resume_completion
from paceline.api.openai.errors import RETRY_AFTER_SECONDS, ApiError
from paceline.api.openai.service import Service
from paceline.api.openai.stream_journal import Recording, parse_event_id

RESUME = {CHAT: resume_chat, COMPLETION: resume_completion}


def resume_stream(service: Service, request: Request, answer_id: str) -> Response:
    """All events after the one that the header ``Last-Event-ID`` names; without it, all.

    Raises ApiError: 404 if there is nothing to take up, 409 if somebody still has the stream or if another model is
    served than the one that began it.
    """
    if service.journal is None:
        raise ApiError(404, "no streams can be taken up: the server was started without --journal")
    stream = service.journal.stream(answer_id)
    if answer_id in service.running:
        retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        raise ApiError(409, f"the stream {answer_id!r} still has a client", code="stream_in_use", headers=retry)
    if stream.opened.identity != service.identity:
        raise ApiError(
            409, f"{stream.opened.identity} began the stream, but {service.identity} is served", code="other_model"
        )
    last = request.headers.get("last-event-id")
    received = None if last is None else parse_event_id(last, stream.num_parts)
    return RESUME[stream.opened.kind](service, Recording(service.journal, stream, received))
