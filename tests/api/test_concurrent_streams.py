"""Thirty-two clients at once, some of whom leave: nobody else notices, and nothing is lost."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.live_server import LiveServer, events, live_server
from support.small_text import small_engine

PATH = "/v1/completions"
NUM_STREAMS = 32
NUM_ROUNDS = 2


def random_body(rng: random.Random) -> dict[str, Any]:
    common = [rng.randrange(256) for _ in range(16)] if rng.random() < 0.3 else list(range(16))
    prompt = common[: rng.choice([0, 8, 16])] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.choice([1, 20, 50, 60]),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "seed": rng.randrange(2**31),
        "stream": True,
        "return_token_ids": True,
    }
    if rng.random() < 0.3:
        body |= {"logprobs": 3, "n": 2}
    if rng.random() < 0.3:
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "min_p": 0.05}
    return body


def content(data: bytes) -> list[Any]:
    """What a stream says, by choice and without the request's own id and time."""
    pieces = events(data)
    assert pieces.pop() == "[DONE]"
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return [[choice for choice in choices if choice["index"] == index] for index in range(2)]


def stream(server: LiveServer, body: dict[str, Any], leave_after: int | None) -> list[Any] | None:
    """Read a stream to its end, or leave once that many bytes have come."""
    if leave_after is None:
        reply = server.send("POST", PATH, json.dumps(body).encode())
        assert reply.status == 200, reply.data
        return content(reply.data)
    with server.begin(PATH, **body) as connection:
        received = 0
        while received < leave_after and (data := connection.recv(4096)):
            received += len(data)
    return None


@pytest.mark.slow
def test_streams_beside_others_equal_their_solo_runs_and_no_block_is_lost() -> None:
    rng = random.Random(11)
    # So few blocks that some have to make room for others.
    with live_server(small_engine(num_blocks=26, max_num_batched_tokens=24)) as server:
        for _ in range(NUM_ROUNDS):
            bodies = [random_body(rng) for _ in range(NUM_STREAMS)]
            leaving = [rng.choice([None, None, None, 1, 1500]) for _ in bodies]
            with ThreadPoolExecutor(NUM_STREAMS) as clients:
                together = list(clients.map(stream, [server] * NUM_STREAMS, bodies, leaving))
            server.wait_until(lambda: server.num_live == 0 and not server.loaded.engine.has_work)
            scheduler = server.loaded.engine.scheduler
            scheduler.check_idle()
            assert scheduler.num_blocks_used == 0
            finished = [(body, said) for body, said in zip(bodies, together, strict=True) if said is not None]
            assert len(finished) >= NUM_STREAMS // 4
            scheduler.reset_prefix_cache()
            for body, said in finished:
                assert said == stream(server, body, None)
        assert scheduler.num_preemptions > 0, "there was room for everybody"
