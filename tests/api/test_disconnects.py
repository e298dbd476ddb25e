"""Who leaves, or is sent away, leaves nothing behind: whatever state the request was in."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.scheduler import Scheduler
from paceline.engine.load import LoadedEngine
from support.fake_runner import FakeRunner
from support.live_server import LiveServer, SlowRunner, events, live_server
from support.small_text import small_engine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a prompt", "ignore_eos": True, "max_tokens": 100, "seed": 1}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """One sequence at a time, 20 ms for each of its tokens."""
    with live_server(small_engine(SlowRunner(FakeRunner(64, 8, 1, 259), 0.02), max_num_seqs=1), max_waiting=4) as live:
        yield live


def scheduler(server: LiveServer) -> Scheduler:
    return server.loaded.engine.scheduler


def assert_nothing_is_left(server: LiveServer) -> None:
    server.wait_until(lambda: server.num_live == 0)
    assert scheduler(server).num_blocks_used == 0
    reply = server.post(PLAIN, prompt="next", max_tokens=2, ignore_eos=True)
    assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 2)


def test_a_client_that_leaves_a_stream_ends_the_work(server: LiveServer) -> None:
    connection = server.begin(PLAIN, **LONG, stream=True)
    received = b""
    while received.count(b"data: ") < 3:
        received += connection.recv(4096)
    connection.close()
    assert_nothing_is_left(server)


def test_a_client_that_does_not_stream_and_leaves_ends_the_work(server: LiveServer) -> None:
    connection = server.begin(PLAIN, **LONG)
    server.wait_until(lambda: scheduler(server).num_running == 1)
    connection.close()
    assert_nothing_is_left(server)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_while_they_wait_never_run(server: LiveServer, stream: bool) -> None:
    running = server.begin(PLAIN, **LONG, stream=True)
    server.wait_until(lambda: scheduler(server).num_running == 1)
    waiting = [server.begin(PLAIN, **LONG, stream=stream) for _ in range(3)]
    server.wait_until(lambda: scheduler(server).num_waiting == 3)
    for connection in waiting:
        connection.close()
    server.wait_until(lambda: scheduler(server).num_waiting == 0)
    assert scheduler(server).num_running == 1
    running.close()
    assert_nothing_is_left(server)


def test_leaving_ends_all_choices_of_all_prompts() -> None:
    with live_server(small_engine(SlowRunner(FakeRunner(64, 8, 8, 259), 0.02))) as server:
        connection = server.begin(PLAIN, **{**LONG, "prompt": ["one", "two", "three"], "max_tokens": 60}, n=4)
        server.wait_until(lambda: server.num_live == 12)
        connection.close()
        assert_nothing_is_left(server)


def test_one_client_leaving_does_not_disturb_another() -> None:
    with live_server(small_engine(SlowRunner(FakeRunner(64, 8, 8, 259), 0.005))) as server:
        expected = server.post(PLAIN, **LONG).json["choices"]
        answers: list[Any] = []
        stays = [
            threading.Thread(target=lambda: answers.append(server.post(PLAIN, **LONG).json["choices"]))
            for _ in range(3)
        ]
        leaves = [server.begin(PLAIN, **LONG, stream=bool(i % 2)) for i in range(4)]
        for thread in stays:
            thread.start()
        for connection in leaves:
            connection.close()
        for thread in stays:
            thread.join()
        assert answers == [expected] * 3
        assert_nothing_is_left(server)


def test_a_refused_prompt_takes_its_companions_with_it(server: LiveServer) -> None:
    reply = server.post(PLAIN, prompt=[[65], [66], [65] * 200])
    assert reply.status == 400
    assert_nothing_is_left(server)


def test_too_many_waiting_requests_are_told_to_come_again(server: LiveServer) -> None:
    connections = [server.begin(PLAIN, **LONG, stream=True)]
    server.wait_until(lambda: scheduler(server).num_running == 1)
    connections += [server.begin(PLAIN, **LONG) for _ in range(4)]
    server.wait_until(lambda: scheduler(server).num_waiting == 4)
    for stream in (False, True):
        reply = server.post(PLAIN, **LONG, stream=stream)
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json["error"]["type"] == "rate_limit_error"
        assert reply.json["error"]["code"] == "queue_full"
    # A request of several prompts is refused as a whole.
    assert server.post(PLAIN, **{**LONG, "prompt": ["a", "b"]}).status == 429
    assert scheduler(server).num_waiting == 4
    for connection in connections:
        connection.close()
    assert_nothing_is_left(server)


# ---- POST /v1/abort


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_request_can_be_aborted_by_its_id(server: LiveServer, path: str, stream: bool) -> None:
    prompt = {"prompt": "a prompt"} if path == PLAIN else {"messages": [{"role": "user", "content": "hi"}]}
    fields = {**prompt, "ignore_eos": True, "max_tokens": 100, "request_id": "mine", "stream": stream}
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(server.post(path, **fields)))
    thread.start()
    server.wait_until(lambda: scheduler(server).num_running == 1)
    assert server.post(path, **{**fields, "stream": False}).json["error"]["param"] == "request_id"
    assert server.post("/v1/abort", request_id="mine").json == {"request_id": "mine", "aborted": True}
    thread.join()
    [reply] = replies
    assert reply.status == 200
    # It must not look like an answer that came to its end.
    if stream:
        *chunks, end = events(reply.data)
        assert end == "[DONE]"
        assert chunks[0]["id"].endswith("-mine")
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    else:
        assert reply.json["choices"][0]["finish_reason"] == "abort"
        assert reply.json["usage"]["completion_tokens"] < 100
    assert server.post("/v1/abort", request_id="mine").json["aborted"] is False
    assert_nothing_is_left(server)


def test_a_waiting_request_can_be_aborted_by_the_id_of_its_answer(server: LiveServer) -> None:
    running = server.begin(PLAIN, **LONG, stream=True)
    server.wait_until(lambda: scheduler(server).num_running == 1)
    replies: list[Any] = []
    fields = {**LONG, "request_id": "queued"}
    thread = threading.Thread(target=lambda: replies.append(server.post(PLAIN, **fields)))
    thread.start()
    server.wait_until(lambda: scheduler(server).num_waiting == 1)
    assert server.post("/v1/abort", request_id="cmpl-queued").json["aborted"] is True
    thread.join()
    assert replies[0].json["choices"][0]["finish_reason"] == "abort"
    assert replies[0].json["choices"][0]["text"] == ""
    running.close()
    assert_nothing_is_left(server)


def test_aborting_what_does_not_run_is_no_error(server: LiveServer) -> None:
    assert server.post("/v1/abort", request_id="nobody").json == {"request_id": "nobody", "aborted": False}


# ---- failures inside


def failing_engine(**tokens: int) -> LoadedEngine:
    return small_engine(FakeRunner(64, 8, 8, 259, **tokens))


def test_a_sequence_that_fails_is_an_error_and_hurts_nobody_else() -> None:
    with live_server(failing_engine(error_token=ord("!"))) as server:
        reply = server.post(PLAIN, prompt="fails!", max_tokens=3)
        assert reply.status == 500
        assert reply.json["error"]["type"] == "server_error"
        assert "error token" in reply.json["error"]["message"]
        # Before the first byte, a stream has the status of its error too.
        assert server.post(PLAIN, prompt="fails!", max_tokens=3, stream=True).status == 500
        assert server.post(PLAIN, prompt=["good", "fails!"], max_tokens=50).status == 500
        assert_nothing_is_left(server)


class FailsLater(FakeRunner):
    """Has nothing to say to the third token of an output."""

    def execute(self, plan: Any) -> Any:
        result = super().execute(plan)
        late = {slot for slot, sequence in self._sequences.items() if len(sequence.tokens) - sequence.num_prompt >= 3}
        seqs = tuple(
            replace(seq, tokens=(), logprobs=(), error="it broke down") if seq.slot in late else seq
            for seq in result.seqs
        )
        return replace(result, seqs=seqs)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_failure_inside_a_stream_is_its_last_event(path: str) -> None:
    with live_server(small_engine(FailsLater(64, 8, 8, 259))) as server:
        prompt = {"prompt": "hi"} if path == PLAIN else {"messages": [{"role": "user", "content": "hi"}]}
        reply = server.post(path, **prompt, stream=True, ignore_eos=True, allowed_token_ids=list(range(65, 91)))
        assert reply.status == 200
        *chunks, last = events(reply.data)
        assert chunks
        assert set(last) == {"error"}
        assert last["error"]["message"] == "it broke down"
        assert last["error"]["type"] == "server_error"
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        server.wait_until(lambda: server.num_live == 0)


def test_a_request_that_no_engine_survives_is_given_up_and_the_others_go_on() -> None:
    def load() -> LoadedEngine:
        return failing_engine(crash_token=ord("!"))

    with live_server(load(), reload=load) as server:
        harmless = {"prompt": "good", "max_tokens": 30, "ignore_eos": True, "seed": 1}
        alone = server.post(PLAIN, **harmless).json["choices"][0]["text"]
        with ThreadPoolExecutor(4) as executor:
            bad = executor.submit(server.post, PLAIN, prompt="fails!", max_tokens=3)
            good = [
                executor.submit(server.post, PLAIN, prompt="good", max_tokens=30, ignore_eos=True, seed=1)
                for _ in "123"
            ]
            reply = bad.result()
            assert (reply.status, reply.json["error"]["code"]) == (500, "engine_lost")
            assert b"Traceback" not in reply.data
            assert [each.result().json["choices"][0]["text"] for each in good] == [alone] * 3
        assert server.send("GET", "/health").json == {"status": "ok"}


def test_an_engine_asleep_refuses_and_what_was_in_flight_goes_on_when_it_wakes() -> None:
    def load() -> LoadedEngine:
        return small_engine(SlowRunner(FakeRunner(64, 8, 8, 259), 0.01))

    with live_server(load(), reload=load) as server:
        alone = server.post(PLAIN, **LONG).json["choices"][0]["text"]
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(server.post, PLAIN, **LONG)
            server.wait_until(lambda: server.num_live == 1)
            assert server.post("/sleep").json == {"status": "sleeping"}
            assert server.send("GET", "/health").json == {"status": "sleeping"}
            for path, prompt in ((PLAIN, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
                reply = server.post(path, **prompt)
                assert (reply.status, reply.json["error"]["code"]) == (503, "engine_unavailable")
                assert "POST /wake_up" in reply.json["error"]["message"]
                assert reply.headers["retry-after"] == "1"
            assert server.post("/sleep").status == 503
            assert server.post("/wake_up").json == {"status": "ok"}
            assert running.result().json["choices"][0]["text"] == alone
        assert server.post("/wake_up").status == 503


def test_a_slow_start_keeps_the_connection_open_with_comments() -> None:
    engine = small_engine(SlowRunner(FakeRunner(64, 8, 1, 259), 0.2), max_num_seqs=1)
    with live_server(engine, ping_interval=0.05) as server:
        reply = server.post(PLAIN, prompt="hi", max_tokens=2, ignore_eos=True, stream=True)
        values = events(reply.data)
        assert values.count(": ping") >= 3
        assert values[-1] == "[DONE]"
        assert sum(isinstance(value, dict) for value in values) <= 3
        assert server.client().completions.create(model="small", prompt="hi", max_tokens=2).choices
        connection = server.begin(PLAIN, **LONG, stream=True)
        connection.recv(100)
        connection.close()
        server.wait_until(lambda: server.num_live == 0)


def test_a_connection_serves_several_requests(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for body in (
        b'{"prompt": "hi", "max_tokens": 1}',
        b"nonsense",
        b'{"prompt": "hi", "max_tokens": 1, "stream": true}',
    ):
        connection.request("POST", PLAIN, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == (400 if body == b"nonsense" else 200)
    connection.close()
