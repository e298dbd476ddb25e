"""Streams go on after their connection or their server was lost, as if nothing had happened."""

from __future__ import annotations

import errno
import http.client
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from paceline.api.openai.errors import ApiError
from paceline.api.openai.stream_journal import KEEP_SECONDS, LINGER_SECONDS, Opened, Recording, Stream, StreamJournal
from paceline.engine.load import LoadedEngine
from paceline.engine.outputs import ChoiceDelta
from paceline.errors import ConfigError
from support.fake_runner import FakeRunner
from support.live_server import PATIENCE, LiveServer, SlowRunner, live_server
from support.small_text import small_engine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True}),
    "choices": (CHAT, {"messages": MESSAGES, "max_tokens": 20, "n": 3, "stream_options": {"include_usage": True}}),
    "stop string": (CHAT, {"messages": MESSAGES, "max_tokens": 300, "stop": ["a", "zz"], "seed": 5}),
    "logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    ),
    "prompts": (PLAIN, {"prompt": ["one", "two", "two"], "max_tokens": 20, "n": 2, "ignore_eos": True}),
    "echo": (PLAIN, {"prompt": "one", "max_tokens": 20, "echo": True, "logprobs": 1, "ignore_eos": True}),
    "early stop": (PLAIN, {"prompt": "one", "max_tokens": 60, "early_stop": {"window": 4, "threshold": 0.5}}),
    "ids": (PLAIN, {"prompt": "one", "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}),
}


@dataclass(frozen=True)
class Event:
    id: str | None
    data: Any
    """The value, or the text of an end mark."""


class Connection:
    """A client that reads events one by one."""

    def __init__(self, server: LiveServer, method: str, path: str, body: Any = None, **headers: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body)
        self._http.request(method, path, data, {"Content-Type": "application/json", **headers})
        self.response = self._http.getresponse()

    def events(self) -> Iterator[Event]:
        number = None
        for line in self.response:
            text = line.decode().rstrip("\n")
            if text.startswith("id: "):
                number = text.removeprefix("id: ")
            elif text.startswith("data: "):
                data = text.removeprefix("data: ")
                yield Event(number, data if data == "[DONE]" else json.loads(data))
                number = None

    def cut(self) -> None:
        assert self.response.fp is not None
        self.response.close()
        self._http.close()


def begin(server: LiveServer, name: str, **fields: Any) -> Connection:
    path, body = REQUESTS[name]
    return Connection(server, "POST", path, {**body, "stream": True, "seed": 9, **fields})


def take_up(server: LiveServer, event: Event) -> Connection:
    """As soon as the server knows that its client is gone."""
    assert event.id is not None
    path, headers = f"/v1/streams/{event.data['id']}", {"Last-Event-ID": event.id}
    for _ in range(1000):
        connection = Connection(server, "GET", path, None, **headers)
        if connection.response.status != 409:
            break
        time.sleep(0.01)
    return connection


def load(seconds: float = 0.0) -> LoadedEngine:
    runner = FakeRunner(64, 8, 8, 259)
    return small_engine(SlowRunner(runner, seconds) if seconds else runner)


@contextmanager
def server_with(journal: Path, seconds: float = 0.0, **settings: Any) -> Iterator[LiveServer]:
    with live_server(load(seconds), journal=journal, **settings) as server:
        yield server


def by_choice(events: list[Event]) -> dict[int, list[Any]]:
    """The events of each choice, in order: choices may come in any order between each other."""
    found: dict[int, list[Any]] = {}
    for event in events:
        if event.data == "[DONE]":
            found.setdefault(-2, []).append(event.data)
            continue
        value = {key: event.data[key] for key in event.data if key not in ("id", "created")}
        found.setdefault(value["choices"][0]["index"] if value["choices"] else -1, []).append(value)
    return found


# ---- streams


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_that_is_cut_anywhere_and_taken_up_is_the_whole_stream(name: str, tmp_path: Path) -> None:
    with server_with(tmp_path / "journal", 0.001) as server:
        whole = list(begin(server, name).events())
        for cut_after in {1, 2, 3, len(whole) // 2, len(whole) - 2}:
            connection = begin(server, name)
            got = list(islice(connection.events(), cut_after))
            connection.cut()
            rest = take_up(server, got[-1])
            assert rest.response.status == 200
            got += rest.events()
            assert by_choice(got) == by_choice(whole)
            assert len({event.id for event in got}) == len(got)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_server_that_stops_tells_so_and_the_next_one_goes_on(name: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with server_with(tmp_path / "other", 0.001) as server:
        whole = by_choice(list(begin(server, name).events()))
    with server_with(journal, 0.03, shutdown_timeout=0.0) as server:
        events = begin(server, name).events()
        got = list(islice(events, 4))
    got += events
    suspended = got.pop()
    assert suspended.id is None
    assert suspended.data["error"]["code"] == "stream_suspended"
    assert f"GET /v1/streams/{got[0].data['id']}" in suspended.data["error"]["message"]
    with server_with(journal, 0.001) as server:
        got += take_up(server, got[-1]).events()
        assert by_choice(got) == whole
        assert [event.data for event in take_up(server, got[-2]).events()] == ["[DONE]"], "the last events may get lost"


def test_without_a_seed_a_stream_keeps_the_seeds_that_were_drawn(tmp_path: Path) -> None:
    with server_with(tmp_path / "journal", 0.01) as server:
        connection = begin(server, "prompts", seed=None)
        got = list(islice(connection.events(), 30))
        connection.cut()
        rest = list(take_up(server, got[-1]).events())
        whole = list(Connection(server, "GET", f"/v1/streams/{got[0].data['id']}").events())
        assert by_choice(got + rest) == by_choice(whole)
        texts = [[value["choices"][0]["text"] for value in by_choice(whole)[choice]] for choice in range(6)]
        assert len({tuple(text) for text in texts}) == 6, "equal prompts have seeds of their own"


def test_what_was_written_down_is_not_computed_again(tmp_path: Path) -> None:
    def num_outputs_computed(server: LiveServer, name: str) -> int:
        connection = begin(server, name, max_tokens=80)
        got = list(islice(connection.events(), 30))
        connection.cut()
        server.wait_until(lambda: not server.engine.in_flight())
        before = server.engine.stats.num_steps
        list(take_up(server, got[-1]).events())
        return server.engine.stats.num_steps - before

    with server_with(tmp_path / "journal", 0.003) as server:
        assert num_outputs_computed(server, "chat") <= 60
        assert num_outputs_computed(server, "logprobs") >= 80, "log-probabilities are not written down"


def test_what_cannot_be_taken_up(tmp_path: Path) -> None:
    def asks(server: LiveServer, path: str, **headers: str) -> tuple[int, str | None, dict[str, str]]:
        reply = server.send("GET", path, headers=headers)
        return reply.status, reply.json["error"]["code"], reply.headers

    journal = tmp_path / "journal"
    with server_with(journal, 0.02, shutdown_timeout=0.0) as server:
        connection = begin(server, "choices")
        event = next(connection.events())
        path = f"/v1/streams/{event.data['id']}"
        status, code, headers = asks(server, path)
        assert (status, code, headers["retry-after"]) == (409, "stream_in_use", "1")
        assert asks(server, "/v1/streams/nobody")[:2] == (404, "stream_not_found")
        connection.cut()
        server.wait_until(lambda: asks(server, path, **{"Last-Event-ID": "?"})[0] != 409)
        for bad in ("1", "1,2,3", "1,2,3,4,5", "a,0,0,0", "-1,0,0,0", "1,,2,3", "\xb2,0,0,0"):
            assert asks(server, path, **{"Last-Event-ID": bad})[0] == 400
        assert server.send("GET", path).status == 200
        running = begin(server, "chat", request_id="mine")
        assert server.post(CHAT, messages=MESSAGES, request_id="mine").status == 400
        running.cut()
    other = load()
    other.info.__dict__["numerics"] = "other"
    with live_server(other, journal=journal) as server:
        assert asks(server, path)[:2] == (409, "other_model")
    with live_server(load()) as server:
        status, _, _ = asks(server, path)
        assert status == 404
        assert b"id: " not in server.post(CHAT, messages=MESSAGES, stream=True, max_tokens=2).data


def test_a_stream_that_somebody_aborts_or_that_fails_has_ended(tmp_path: Path) -> None:
    with server_with(tmp_path / "journal", 0.02) as server:
        connection = begin(server, "chat")
        events = connection.events()
        got = [next(events)]
        assert server.post("/v1/abort", request_id=got[0].data["id"]).json["aborted"]
        got += events
        assert got[-2].data["choices"][0]["finish_reason"] == "abort"
        assert got[-1].data == "[DONE]"


def test_a_server_without_room_on_its_disk_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server_with(tmp_path / "journal") as server:
        whole = by_choice(list(begin(server, "chat").events()))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("paceline.api.openai.stream_journal.os.write", full)
        for _ in range(2):
            assert by_choice(list(begin(server, "chat").events())) == whole
        assert [record.message for record in caplog.records if "No space left" in record.message] != []


# ---- the file


def stream(answer_id: str, created: float = 0.0) -> Stream:
    return Stream(Opened(answer_id, "cmpl", b"{}", int(created), (7,), "model", True, ((), ())))


def bring(journal: StreamJournal, stream: Stream, choice: int, *tokens: int) -> None:
    Recording(journal, stream).note(choice, ChoiceDelta(choice, token_ids=(*stream.outputs[choice], *tokens)), [5])


def reopened(journal: StreamJournal, path: Path, now: float = 0.0) -> StreamJournal:
    journal.close()
    return StreamJournal(path, clock=lambda: now)


def test_a_file_brings_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = StreamJournal(path, clock=lambda: 0.0)
    for name in "abc":
        journal.open_stream(stream(name))
        bring(journal, journal.stream(name), 1, 10)
        bring(journal, journal.stream(name), 1, 11, 12)
    journal.end_stream(journal.stream("b"))
    journal.open_stream(stream("c"))
    for _ in range(2):
        journal = reopened(journal, path, now=1.0)
        assert journal.stream("a").outputs == [[], [10, 11, 12]]
        assert journal.stream("a").num_cached == (5,)
        assert (journal.stream("a").ended, journal.stream("b").ended) == (None, 0.0)
        assert journal.stream("c").outputs == [[], []], "the id was used again"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


def test_a_record_that_was_not_completely_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = StreamJournal(path, clock=lambda: 0.0)
    journal.open_stream(stream("a"))
    bring(journal, journal.stream("a"), 0, 10)
    size = path.stat().st_size
    bring(journal, journal.stream("a"), 0, 11)
    journal.close()
    data = path.read_bytes()
    for cut in range(size, len(data)):
        path.write_bytes(data[:cut])
        journal = StreamJournal(path, clock=lambda: 0.0)
        assert journal.stream("a").outputs == [[10], []]
        journal.close()


@pytest.mark.parametrize("data", [b"{}", b"\x05\x00\x00\x00hello", b"GGUF" * 100, b"\xff\xff\xff\x7f"])
def test_a_file_of_something_else_is_refused_and_left_alone(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a journal"):
        StreamJournal(path)
    assert path.read_bytes() == data


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = StreamJournal(path, clock=lambda: 0.0)
    start = path.stat().st_size
    journal.open_stream(stream("a"))
    journal.close()
    data = bytearray(path.read_bytes())
    data[start + 4] = 0xC1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"damaged at byte {start}"):
        StreamJournal(path)


def test_one_server_at_a_time_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = StreamJournal(path)
    with pytest.raises(ConfigError, match="another server uses it"):
        StreamJournal(path)
    reopened(journal, path).close()
    with pytest.raises(ConfigError, match="No such file"):
        StreamJournal(tmp_path / "nowhere" / "journal")
    with pytest.raises(ConfigError, match="Is a directory"):
        StreamJournal(tmp_path)


def test_the_file_stays_as_small_as_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.api.openai.stream_journal.SMALL_FILE", 2000)
    path, now = tmp_path / "journal", 0.0
    journal = StreamJournal(path, clock=lambda: now)
    journal.open_stream(stream("long"))
    for number in range(2000):
        now += 1
        journal.open_stream(stream(f"s{number}", now))
        bring(journal, journal.stream(f"s{number}"), 0, number)
        bring(journal, journal.stream("long"), 0, number)
        journal.end_stream(journal.stream(f"s{number}"))
        assert path.stat().st_size < 50_000
    journal = reopened(journal, path, now)
    assert journal.stream("long").outputs[0] == list(range(2000))


def test_streams_are_forgotten_after_their_time_and_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    journal = StreamJournal(tmp_path / "journal", clock=lambda: now)
    for name in "abc":
        journal.open_stream(stream(name))
    journal.end_stream(journal.stream("b"))
    now = LINGER_SECONDS
    journal.stream("b")
    now = LINGER_SECONDS + 1
    journal.stream("a")
    with pytest.raises(ApiError, match="forgotten"):
        journal.stream("b")
    now = KEEP_SECONDS + 1
    with pytest.raises(ApiError):
        journal.stream("a")
    monkeypatch.setattr("paceline.api.openai.stream_journal.MAX_STREAMS", 2)
    for name in "wxyz":
        journal.open_stream(stream(name, now))
        if name == "x":
            journal.end_stream(journal.stream("x"))
    journal.stream("y")
    journal.stream("z")
    for name in "wx":
        with pytest.raises(ApiError):
            journal.stream(name)
