"""The errors that Paceline raises on purpose. Anything else that escapes is a defect of ours."""

from __future__ import annotations


class RequestError(ValueError):
    """A request asks for something that cannot be done: the caller's mistake, HTTP 400.

    ``param`` names the offending field as the caller spelt it; the message states the limit that was broken.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


NO_TOKEN_LEFT = "no token is left to choose from: allowed_token_ids, bad_words, min_tokens and grammar forbid every one"
"""Why a sequence ends that its own rules led into a corner: the caller's doing, though it shows on the way only."""


GRAMMAR_FAILED = "the structured output cannot go on"
"""How the error begins of a sequence whose grammar leads to a dead end, or takes more work than one step may have."""


WAITED_TOO_LONG = "the request waited too long"
"""How the error begins of a sequence that was not started within ``queue_timeout``."""


ENGINE_LOST = "the engine was lost again and again"
"""How the error begins of a sequence that was given up because engines do not survive it."""


class CheckpointError(ValueError):
    """A model's files are missing, damaged, or of a kind that is not supported. The message names file and item."""


class ConfigError(ValueError):
    """Engine settings contradict each other or do not fit this machine. The message gives the arithmetic."""


class QueueFull(RequestError):  # noqa: N818  (named like the standard library's queue.Full)
    """Too many requests wait already: this one may be sent again later, HTTP 429."""


class EngineUnavailable(RuntimeError):  # noqa: N818  (a state, not a mistake)
    """The engine takes no requests: it is stopped, asleep or lost for good, HTTP 503. The message says which."""
