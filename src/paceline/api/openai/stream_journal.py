"""Streams that outlive their server: what was asked, in a file, and how far the answers had come.

The request alone determines its answer, so the file needs nothing else to be right: a stream that is taken up again
brings what it would have brought. Output tokens are written down so that they need not be computed again, for requests
whose events depend on tokens alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.api.openai.errors import ApiError
from paceline.api.openai.streaming import event
from paceline.engine.messages import LENGTH, Message, frame
from paceline.engine.outputs import ChoiceDelta
from paceline.errors import ConfigError
from paceline.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FORMAT = "paceline streams 1"
KEEP_SECONDS, LINGER_SECONDS = 3600, 60
"""How long a stream can be taken up again after it began, and after it ended: its last events may have got lost."""
MAX_STREAMS = 4096
"""Streams that can be taken up again; beyond that the oldest cannot."""
SMALL_FILE = 2**20
"""Bytes below which the file is not written afresh."""


class Header(Message, frozen=True):
    """The first record: what this file is."""

    format: str = FORMAT


class Opened(Message, frozen=True):
    """A stream begins.

    Attributes:
        answer_id: what the answer is called.
        kind: of the answer: what its id begins with.
        body: the JSON object that was asked for.
        created: seconds since 1970.
        seeds: one for each prompt.
        identity: names the model and everything else that may change a bit of the answer.
        tokens_suffice: the events of the answer can be made from its tokens, without computing them.
        outputs: tokens of each choice, in the order of the answer; empty unless they suffice.
        num_cached: prompt tokens that the prefix cache saved, for each prompt; empty if that is not known yet.
        ended: when all of it had been sent, in seconds since 1970.
    """

    answer_id: str
    kind: str
    body: bytes
    created: int
    seeds: tuple[int, ...]
    identity: str
    tokens_suffice: bool
    outputs: tuple[tuple[int, ...], ...]
    num_cached: tuple[int, ...] = ()
    ended: float | None = None


class Brought(Message, frozen=True):
    """New tokens of a choice."""

    answer_id: str
    choice: int
    tokens: tuple[int, ...]
    num_cached: tuple[int, ...]


class Ended(Message, frozen=True):
    """All of a stream has been sent, or it has failed for good."""

    answer_id: str
    at: float


Record = Header | Opened | Brought | Ended


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the answer to one prompt before it is computed: its seed, the first tokens of its choices."""

    seed: int
    outputs: tuple[tuple[int, ...], ...]
    num_cached_tokens: int


@dataclass(slots=True)
class Stream:
    """What is written down of one stream.

    Attributes:
        opened: what began it.
        outputs: the tokens of each choice, as far as they are known.
        num_cached: prompt tokens that the prefix cache saved, for each prompt; empty if that is not known yet.
        ended: when all of it had been sent, in seconds since 1970.
    """

    opened: Opened
    outputs: list[list[int]] = field(init=False)
    num_cached: tuple[int, ...] = field(init=False)
    ended: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = [list(tokens) for tokens in self.opened.outputs]
        self.num_cached = self.opened.num_cached
        self.ended = self.opened.ended

    @property
    def num_parts(self) -> int:
        """The choices, and what comes after them."""
        return len(self.outputs) + 1

    def known(self, prompt: int, num_choices: int) -> Known:
        """Of the answer to one of the prompts, which has ``num_choices``."""
        outputs = self.outputs[prompt * num_choices : (prompt + 1) * num_choices]
        num_cached = self.num_cached[prompt] if self.num_cached else 0
        return Known(self.opened.seeds[prompt], tuple(map(tuple, outputs)), num_cached)

    def to_record(self) -> Opened:
        outputs = tuple(tuple(tokens) for tokens in self.outputs)
        return msgspec.structs.replace(self.opened, num_cached=self.num_cached, outputs=outputs, ended=self.ended)


class Recording:
    """Brings a stream from its start to a client that has ``received`` so many events of each part, and notes it."""

    def __init__(self, journal: StreamJournal, stream: Stream, received: Sequence[int] | None = None) -> None:
        self.stream = stream
        self._journal = journal
        self._received = list(received or [0] * stream.num_parts)
        self._sent = [0] * stream.num_parts
        self._seen = [0] * len(stream.outputs)

    def note(self, choice: int, delta: ChoiceDelta, num_cached: Sequence[int]) -> None:
        """Write down the tokens of a delta, unless they are known. What ends a choice is left to be found again."""
        stream = self.stream
        if not stream.opened.tokens_suffice:
            return
        self._seen[choice] += len(delta.token_ids)
        num_new = self._seen[choice] - len(stream.outputs[choice])
        if num_new > 0 and delta.finish_reason is None:
            tokens = delta.token_ids[-num_new:]
            stream.outputs[choice] += tokens
            stream.num_cached = tuple(num_cached)
            self._journal.write(Brought(stream.opened.answer_id, choice, tokens, stream.num_cached))

    def event(self, part: int, value: Any) -> bytes:
        """The event, with an id that tells how many of each part have been sent; empty if the client has it."""
        self._sent[part] += 1
        if self._sent[part] <= self._received[part]:
            return b""
        counts = map(max, self._sent, self._received)
        return b"id: " + ",".join(map(str, counts)).encode() + b"\n" + event(value)

    def end(self) -> None:
        """All has been sent, or nothing more can be."""
        self._journal.end_stream(self.stream)


class StreamJournal:
    """The file, and the streams in it that can be taken up again.

    Only one server at a time has it. It holds prompts and answers, and is readable by its owner alone. Records are
    handed to the system at once but not forced to the disk: they outlive the process, not the machine.

    Raises ConfigError if the file cannot be used.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._open: dict[str, Stream] = {}
        self._ended: dict[str, Stream] = {}
        self._size = self._size_when_new = 0
        try:
            self._file: int | None = _open_locked(path)
            self._read()
            self._rewrite()
        except OSError as error:
            raise ConfigError(f"journal: {path}: {error.strerror}") from None

    def open_stream(self, stream: Stream) -> None:
        """A new stream; an older one of the same id cannot be taken up any more."""
        self._add(stream)
        self._forget_old()
        self.write(stream.opened)

    def stream(self, answer_id: str) -> Stream:
        """Raises ApiError 404."""
        self._forget_old()
        found = self._open.get(answer_id) or self._ended.get(answer_id)
        if found is None:
            message = f"there is no stream {answer_id[:100]!r} to take up; after some time they are forgotten"
            raise ApiError(404, message, code="stream_not_found")
        return found

    def end_stream(self, stream: Stream) -> None:
        """Safe to repeat."""
        if stream.ended is None:
            stream.ended = self._clock()
            self._add(stream)
            self.write(Ended(stream.opened.answer_id, stream.ended))

    def write(self, record: Message) -> None:
        """Append a record, of something that the streams know already."""
        try:
            if self._size > max(2 * self._size_when_new, SMALL_FILE):
                self._rewrite()
            else:
                self._append(record)
        except OSError as error:
            # A full disk is no reason to refuse answers.
            logger.error("%s: %s; streams cannot be taken up after a restart any more", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write nothing any more, and let another server have the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, record: Message) -> None:
        if self._file is not None:
            self._size += os.write(self._file, frame(record))

    def _add(self, stream: Stream) -> None:
        answer_id = stream.opened.answer_id
        self._open.pop(answer_id, None)
        self._ended.pop(answer_id, None)
        (self._open if stream.ended is None else self._ended)[answer_id] = stream

    def _forget_old(self) -> None:
        """Both kinds are in the order of the time that counts."""
        now = self._clock()
        while self._ended and (first := next(iter(self._ended.values()))):
            if len(self._ended) + len(self._open) <= MAX_STREAMS and (first.ended or 0) >= now - LINGER_SECONDS:
                break
            del self._ended[first.opened.answer_id]
        while self._open and (first := next(iter(self._open.values()))):
            if len(self._open) <= MAX_STREAMS and first.opened.created >= now - KEEP_SECONDS:
                break
            del self._open[first.opened.answer_id]

    def _read(self) -> None:
        for record in _records(self._path):
            if isinstance(record, Opened):
                self._add(Stream(record))
            elif not isinstance(record, Header) and (stream := self._open.get(record.answer_id)):
                if isinstance(record, Ended):
                    stream.ended = record.at
                    self._add(stream)
                else:
                    stream.outputs[record.choice] += record.tokens
                    stream.num_cached = record.num_cached
        self._forget_old()

    def _rewrite(self) -> None:
        """Put what is still of use into a new file, which takes the old one's place at once."""
        if self._file is None:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        old, self._file, self._size = self._file, _open_locked(new), 0
        os.close(old)
        self._append(Header())
        for stream in (*self._open.values(), *self._ended.values()):
            self._append(stream.to_record())
        self._size_when_new = self._size
        new.replace(self._path)


def _open_locked(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(f"journal: {path}: another server uses it") from None
    return file


def _records(path: Path) -> Iterator[Record]:
    """What the file holds, up to a last record that was not completely written. Raises ConfigError, OSError."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        size = int.from_bytes(data[start : start + LENGTH.size], "little")
        end = start + LENGTH.size + size
        if end > len(data) and start:
            return
        try:
            record = msgspec.msgpack.decode(data[start + LENGTH.size : end], type=Record)
        except msgspec.DecodeError:
            record = None
        if record is None or (start == 0) != (record == Header()):
            raise ConfigError(f"journal: {path} is not a journal of this version, or is damaged at byte {start}")
        yield record
        start = end


def tokens_suffice(params: SamplingParams) -> bool:
    """Whether the events of an answer can be made from its tokens, without computing them."""
    return params.logprobs is None and params.prompt_logprobs is None and params.early_stop is None


def parse_event_id(text: str, num_parts: int) -> list[int]:
    """The events of each part that a client has. Raises ApiError 400."""
    counts = text.split(",")
    if len(counts) != num_parts or not all(count.isascii() and count.isdigit() for count in counts):
        raise ApiError(400, f"Last-Event-ID must be the id of an event of this stream, not {text[:100]!r}")
    return [int(count) for count in counts]
