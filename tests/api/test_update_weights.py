"""Other weights by a request to the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.engine.load import LoadedEngine
from support.fake_runner import FakeRunner
from support.live_server import SlowRunner, live_server
from support.small_text import small_engine

PLAIN, UPDATE = "/v1/completions", "/update_weights_from_disk"
LONG = {"prompt": "tell me", "max_tokens": 60, "seed": 3, "ignore_eos": True}


def load_old() -> LoadedEngine:
    return small_engine(SlowRunner(FakeRunner(64, 8, 8, 259), 0.005))


def load_new() -> LoadedEngine:
    return small_engine(SlowRunner(FakeRunner(64, 8, 8, 128), 0.005))


def test_a_running_answer_ends_with_its_own_weights_and_the_next_has_the_new() -> None:
    with live_server(load_old(), reload=load_old, others={"new": load_new}) as server, ThreadPoolExecutor(2) as pool:
        of_old = server.post(PLAIN, **LONG).json["choices"][0]["text"]
        running = pool.submit(server.post, PLAIN, **LONG)
        server.wait_until(lambda: server.num_live == 1)
        update = pool.submit(server.post, UPDATE, model_path="new")
        server.wait_until(lambda: server.send("GET", "/health").json == {"status": "loading"})
        refused = server.post(PLAIN, **LONG)
        assert (refused.status, refused.json["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["retry-after"] == "1"
        assert running.result().json["choices"][0]["text"] == of_old
        reply = update.result()
        assert (reply.status, reply.json["success"], reply.json["message"]) == (200, True, "new is served")
        model = server.send("GET", "/v1/models").json["data"][0]
        assert (model["id"], model["root"]) == (reply.json["model"], "new")
        of_new = server.post(PLAIN, **LONG, model=model["id"]).json["choices"][0]["text"]
        assert of_new != of_old
        assert server.send("GET", "/health").json == {"status": "ok"}

        running = pool.submit(server.post, PLAIN, **LONG)
        server.wait_until(lambda: len(server.engine.in_flight()) == 1)
        assert server.post(UPDATE, model_path="new", abort_all_requests=True).status == 200
        assert running.result().json["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"model_path": "missing"}, "model_path", "missing: no such file"),
        ({}, "model_path", "required"),
        ({"model_path": ""}, "model_path", "at least 1 character"),
        ({"model_path": 7}, "model_path", "string"),
        ({"model_path": "new", "abort_all_requests": "perhaps"}, "abort_all_requests", "boolean"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(body: dict[str, object], param: str, says: str) -> None:
    with live_server(load_old(), reload=load_old, others={"new": load_new}) as server:
        before = server.post(PLAIN, **LONG).json["choices"]
        reply = server.send("POST", UPDATE, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
        assert says.lower() in reply.json["error"]["message"].lower()
        assert server.post(PLAIN, **LONG).json["choices"] == before
