"""What crosses between the front of an engine and its loop, in one process or between two.

Plain data all of it, so that one encoding serves: MessagePack, each message after its length.
"""

from __future__ import annotations

import struct

import msgspec

from paceline.config import EngineConfig
from paceline.core.request import Request
from paceline.types import TokenEvent, TokenRules

LENGTH = struct.Struct("<I")
"""What stands before each message on a socket: its bytes, little-endian."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of them all."""


class Launch(Message, frozen=True):
    """The first message to an engine process: what to load."""

    config: EngineConfig
    log_level: int


class Submit(Message, frozen=True):
    """A sequence, with what it has said already: another engine may have begun it.

    Attributes:
        tokens: prompt, then output so far.
        num_prompt: how many of them are prompt.
        num_scored: prompt positions whose log-probabilities were delivered.
        num_likely: output tokens that an early stop has counted.
        num_cached_tokens: prompt tokens that the prefix cache saved at its first start; None before that.
    """

    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    rules: TokenRules
    priority: int
    cache_salt: str
    adapter: str | None = None
    num_scored: int = 0
    num_likely: int = 0
    num_cached_tokens: int | None = None

    def to_request(self) -> Request:
        prompt, output = self.tokens[: self.num_prompt], self.tokens[self.num_prompt :]
        request = Request(self.request_id, list(prompt), self.rules, self.priority, self.cache_salt, self.adapter)
        request.resume(
            list(output),
            num_scored=self.num_scored,
            num_likely=self.num_likely,
            num_cached_tokens=self.num_cached_tokens,
        )
        return request


class Abort(Message, frozen=True):
    """End a sequence, in whatever state it is; one that has ended already is left alone."""

    request_id: str


class ResetPrefixCache(Message, frozen=True):
    """Forget every cached prefix."""


class Ping(Message, frozen=True):
    """To be answered between two steps, as a sign that the loop runs."""


class Stop(Message, frozen=True):
    """End the loop; what still runs is dropped."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What only the engine itself knows of the model it has loaded.

    Attributes:
        max_model_len: tokens of prompt and output together.
        num_blocks: blocks of its key-value store.
        numerics: names everything that may change a bit of the results.
    """

    max_model_len: int
    num_blocks: int
    numerics: str


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges of this moment, and counters since this engine began.

    Attributes:
        num_running, num_waiting: sequences.
        num_blocks_used: blocks of the key-value store that sequences hold.
        num_steps: steps carried out.
        step_seconds: time spent in them.
        num_computed: tokens computed, of prompts and outputs.
        num_preemptions: sequences that had to make room.
        prefix_queries: tokens of all sequences at their first start.
        prefix_hits: those of them that the prefix cache spared.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_computed: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Ready(Message, frozen=True):
    """The model is loaded: sequences may come."""

    facts: EngineFacts


class StepBegins(Message, frozen=True):
    """The sequences of the steps from now on. Sent when they are others than in the step before."""

    request_ids: tuple[str, ...]


class StepEnds(Message, frozen=True):
    """The news of a step."""

    events: tuple[TokenEvent, ...]
    stats: EngineStats


class Pong(Message, frozen=True):
    """The answer to a ping."""


class Failed(Message, frozen=True):
    """The engine's last words: why it cannot be loaded, or go on. ``kind`` names the exception's class."""

    kind: str
    message: str


ToEngine = Submit | Abort | ResetPrefixCache | Ping | Stop
FromEngine = Ready | StepBegins | StepEnds | Pong | Failed


def frame(message: Message) -> bytes:
    """A message as it goes over a socket."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
