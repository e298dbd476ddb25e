"""The whole server is killed and started again, and its streams go on."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
PATIENCE = 60
REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Name ten rivers."}], "max_tokens": 200, "temperature": 0},
    {"messages": [{"role": "user", "content": "Tell me of rain."}], "max_tokens": 200, "seed": 3, "n": 2},
    {"messages": [{"role": "user", "content": "A list."}], "max_tokens": 200, "logprobs": True, "temperature": 0},
    {
        "messages": [{"role": "user", "content": "A person, as JSON."}],
        "max_tokens": 200,
        "seed": 4,
        "response_format": {"type": "json_object"},
    },
]


@contextmanager
def serving(model: Path, journal: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server process and its port. It is killed at the end."""
    command = [
        sys.executable, "-m", "paceline", "serve", str(model), "--port", "0", "--num-threads", "1",
        "--num-kv-blocks", "64", "--max-model-len", "512", "--max-num-seqs", "8", "--journal", str(journal),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    try:
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r"on http://127.*:(\d+)", line)))
        yield port, process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """(id, value) of each; those that were cut off in the middle do not count."""
    number = ""
    try:
        for line in response:
            if line.startswith(b"id: "):
                number = line.decode().split()[1]
            elif line.startswith(b"data: {") and line.endswith(b"\n"):
                yield number, json.loads(line.removeprefix(b"data: "))
    except (http.client.IncompleteRead, ConnectionError):
        return


def ask(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
    return connection.getresponse()


def by_choice(got: list[tuple[str, Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for _, value in got:
        for choice in value["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def test_streams_go_on_after_the_server_was_killed(smollm2_path: Path, tmp_path: Path) -> None:
    with serving(smollm2_path, tmp_path / "first") as (port, _):
        whole = [by_choice(list(events(ask(port, body)))) for body in REQUESTS]
    journal = tmp_path / "journal"
    with serving(smollm2_path, journal) as (port, process):
        answers = [events(ask(port, body)) for body in REQUESTS]
        got = [list(islice(answer, 3 + 2 * number)) for number, answer in enumerate(answers)]
        process.kill()
        got = [[*some, *answer] for some, answer in zip(got, answers, strict=True)]
    with serving(smollm2_path, journal) as (port, _):
        for number, some in enumerate(got):
            assert len(by_choice(some)[0]) < len(whole[number][0]), "it was not killed in time"
            last, value = some[-1]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request("GET", f"/v1/streams/{value['id']}", headers={"Last-Event-ID": last})
            response = connection.getresponse()
            assert response.status == 200
            some += events(response)
    assert [by_choice(some) for some in got] == whole
