"""The default model behind the real server, spoken to by the reference client."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.load import load_engine
from support.live_server import LiveServer, live_server

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[LiveServer]:
    config = EngineConfig(str(smollm2_path), num_threads=1, max_model_len=512, max_num_seqs=16, kv_cache_memory=2**28)
    with live_server(load_engine(config, progress=False), served_model_names=("smollm2",)) as live:
        yield live


def test_it_knows_the_capital_of_france(server: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    fields: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 16}
    client = server.client()
    answer = client.chat.completions.create(**fields)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    usage = chunks[-1].usage
    assert usage is not None
    assert answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_streams_among_clients_that_leave_equal_their_solo_runs(server: LiveServer) -> None:
    rng = random.Random(5)
    requests = [
        {
            "prompt": f"{rng.choice(['Once upon a time', 'The list of numbers:', 'def f(x):'])} {number}",
            "max_tokens": rng.randint(2, 8),
            "temperature": rng.choice([0, 1]),
            "seed": number,
            "logprobs": 1,
        }
        for number in range(5)
    ]
    solo = [server.post("/v1/completions", **request).json["choices"] for request in requests]
    together: dict[int, Any] = {}

    def stay(number: int) -> None:
        together[number] = server.post("/v1/completions", **requests[number]).json["choices"]

    def leave(number: int) -> None:
        connection = server.begin("/v1/completions", **{**requests[number], "max_tokens": 200}, stream=True)
        time.sleep(rng.random())
        connection.close()

    threads = [threading.Thread(target=stay, args=(number,)) for number in range(5)]
    threads += [threading.Thread(target=leave, args=(number,)) for number in range(3)]
    rng.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(5)] == solo
    server.wait_until(lambda: server.num_live == 0)
    assert server.loaded.engine.scheduler.num_blocks_used == 0


def test_a_harness_scores_continuations_by_ids(server: LiveServer) -> None:
    def ids(text: str) -> list[int]:
        tokens: list[int] = server.post("/tokenize", prompt=text, add_special_tokens=False).json["tokens"]
        return tokens

    context = ids("The capital of France is")
    likely, unlikely = ids(" Paris"), ids(" banana")
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = server.post("/v1/completions", prompt=[context + likely, context + unlikely], **fields).json["choices"]
    scores = [sum(choice["logprobs"]["token_logprobs"][len(context) : -1]) for choice in choices]
    assert scores[0] > scores[1] + 3
    for choice, end in zip(choices, (likely, unlikely)):
        assert len(choice["logprobs"]["tokens"]) == len(context) + len(end) + 1
        assert "".join(choice["logprobs"]["tokens"][:-1]) == "The capital of France is" + (
            " Paris" if end is likely else " banana"
        )
        offsets = choice["logprobs"]["text_offset"]
        for start, token in zip(offsets, choice["logprobs"]["tokens"]):
            assert choice["text"][start:].startswith(token)
