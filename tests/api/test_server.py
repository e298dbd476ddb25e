"""The server around the routes: keys, ids, health, models, shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.api.server import ServerConfig, run_server
from paceline.api.server_config import read_api_keys
from paceline.errors import ConfigError
from support.live_server import PATIENCE, LiveServer, live_server
from support.small_text import small_engine

TESTS = Path(__file__).parents[1]
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/abort"), ("GET", "/v1/models"),
    ("GET", "/v1/models/small"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
    ("GET", "/openapi.json"), ("GET", "/nothing"), ("GET", "/health/"), ("GET", "//health"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine()) as live:
        yield live


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with live_server(small_engine(), api_keys=("first-key", "zweiter-schlüssel")) as live:
        yield live


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"]
)
def test_every_route_needs_a_key(locked: LiveServer, method: str, path: str, shown: str | None) -> None:
    reply = locked.send(method, path, None, {} if shown is None else {"Authorization": shown})
    assert reply.status == 401
    assert reply.json["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert b"first-key" not in reply.data


def test_health_needs_no_key(locked: LiveServer) -> None:
    assert [locked.send(method, path).status for method, path in
            [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]] == [200] * 3  # fmt: skip


def test_any_of_the_keys_opens(locked: LiveServer) -> None:
    for shown in (b"Bearer first-key", b"bearer first-key", "Bearer zweiter-schlüssel".encode()):
        assert locked.send("GET", "/v1/models", None, {"Authorization": shown}).status == 200  # type: ignore[dict-item]
    assert locked.client("first-key").models.list().data[0].id == "small"


@pytest.mark.parametrize(
    ("keys", "opens", "administers"),
    [((), {None, "user", "admin"}, {"admin"}), (("user",), {"user", "admin"}, {"admin"})],
)
def test_what_concerns_everybody_asks_for_the_administrator(
    keys: tuple[str, ...], opens: set[str | None], administers: set[str | None]
) -> None:
    with live_server(small_engine(), api_keys=keys, admin_api_keys=("admin",)) as live:
        for shown in (None, "user", "admin", "other"):
            headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
            may_open = shown in opens or (shown == "other" and not keys)
            assert live.send("GET", "/v1/models", None, headers).status == (200 if may_open else 401)
            # Awake and without other weights, these have nothing to do, which is not what is asked here.
            for path in ("/wake_up", "/update_weights_from_disk", "/reset_prefix_cache"):
                assert (live.send("POST", path, b"{}", headers).status != 401) == (shown in administers)
            assert live.send("GET", "/health", None, headers).status == 200
        assert live.send("POST", "/sleep", None, {"Authorization": "Bearer user"}).status == 401
        assert live.engine.is_healthy


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nalpha\n\n  beta  \n")
    assert read_api_keys(path) == ("alpha", "beta")
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"api_key_file: .*keys holds no key"):
        read_api_keys(path)
    with pytest.raises(ConfigError, match=r"api_key_file: .*absent: No such file"):
        read_api_keys(tmp_path / "absent")


ORIGIN = {"Origin": "https://example.org"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_pages_of_other_origins_are_not_let_in_by_default(server: LiveServer) -> None:
    assert "access-control-allow-origin" not in server.send("GET", "/v1/models", None, ORIGIN).headers
    assert server.send("OPTIONS", "/v1/chat/completions", None, PREFLIGHT).status == 405


def test_pages_of_allowed_origins_are_let_in() -> None:
    with live_server(small_engine(), allowed_origins=("https://example.org",), api_keys=("key",)) as live:
        preflight = live.send("OPTIONS", "/v1/chat/completions", None, PREFLIGHT)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://example.org"
        # The page has to be able to read a refusal, too.
        assert live.send("GET", "/v1/models", None, ORIGIN).headers["access-control-allow-origin"] == ORIGIN["Origin"]
        other = live.send("GET", "/v1/models", None, {"Origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_a_request_id_is_returned_on_every_answer(server: LiveServer, locked: LiveServer) -> None:
    sent = {"X-Request-Id": "my-id-1"}
    assert server.send("GET", "/health", None, sent).headers["x-request-id"] == "my-id-1"
    assert server.send("GET", "/nothing", None, sent).headers["x-request-id"] == "my-id-1"
    assert server.send("POST", "/v1/completions", b"junk", sent).headers["x-request-id"] == "my-id-1"
    assert locked.send("GET", "/v1/models", None, sent).headers["x-request-id"] == "my-id-1"
    stream = {"prompt": "hi", "stream": True, "max_tokens": 1}
    assert server.send("POST", "/v1/completions", stream, sent).headers["x-request-id"] == "my-id-1"
    own = [server.send("GET", "/health").headers["x-request-id"] for _ in range(2)]
    assert own[0] != own[1]
    assert server.send("GET", "/health", None, {"X-Request-Id": "x" * 300}).headers["x-request-id"] != "x" * 300


def test_models_are_listed_under_all_their_names() -> None:
    with live_server(small_engine(), served_model_names=("main", "org/alias")) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["main", "org/alias"]
        assert client.models.retrieve("org/alias").owned_by == "paceline"
        model = server.send("GET", "/v1/models/main").json
        assert model["max_model_len"] == 128
        assert server.send("GET", "/v1/models/small").status == 404


def test_the_version_states_the_limits(server: LiveServer) -> None:
    answer = server.send("GET", "/version").json
    assert answer["version"]
    assert answer["limits"]["max_model_len"] == 128
    assert answer["limits"]["max_n"] == 128
    assert answer["limits"]["max_logprobs"] == 20


def test_the_interface_describes_its_bodies(server: LiveServer) -> None:
    paths = server.send("GET", "/openapi.json").json["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["messages"]
    assert "temperature" in body["properties"]
    assert {path for _, path in ROUTES[:8]} - set(paths) == {"/v1/models/small"}


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenised(server: LiveServer) -> None:
    for body in ({"prompt": "x" * 100_000}, {"prompt": "x" * 100_000, "truncate_prompt_tokens": 5}):
        error = server.send("POST", "/v1/completions", body).json["error"]
        assert error["param"] == "prompt"
        assert "100000 bytes" in error["message"]
    messages = [{"role": "user", "content": "x" * 100_000}]
    assert server.post("/v1/chat/completions", messages=messages).json["error"]["param"] == "messages"


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in ({"port": 70000}, {"api_keys": ("",)}, {"ping_interval": 0.0}, {"shutdown_timeout": -1.0},
                     {"max_body_bytes": 0}, {"served_model_names": ("",)}, {"api_keys": ("a b",)},
                     {"admin_api_keys": ("",)},
                     {"allowed_origins": ("example.org",)}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ServerConfig(**settings)  # type: ignore[arg-type]


def test_an_address_in_use_is_named(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match=str(server.port)):
        run_server(server.engine, ServerConfig(port=server.port))


# ---- shutdown, in a process of its own

PROGRAM = """
import logging, sys
sys.path.insert(0, sys.argv[1])
from paceline.api.server import ServerConfig, run_server
from support.fake_runner import FakeRunner
from support.live_server import SlowRunner
from support.served import served
from support.small_text import small_engine

logging.basicConfig(level=logging.INFO)
engine = served(small_engine(SlowRunner(FakeRunner(64, 8, 8, 259), 0.1)))
run_server(engine, ServerConfig(port=0, shutdown_timeout=float(sys.argv[2])))
"""


def start(shutdown_timeout: float) -> tuple[subprocess.Popen[str], LiveServer]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(TESTS), str(shutdown_timeout)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "serving small on" in line:
            port = int(line.split("http://127.0.0.1:")[1].split()[0])
            break
    else:
        pytest.fail("the server did not start")
    live = LiveServer(port, None, None)  # type: ignore[arg-type]
    assert live.send("GET", "/health").status == 200
    return process, live


@pytest.mark.slow
@pytest.mark.parametrize(("patience", "finish"), [(30.0, "length"), (0.0, "abort")])
def test_a_signal_lets_requests_end_and_exits_with_success(patience: float, finish: str) -> None:
    process, live = start(patience)
    connection = live.begin("/v1/completions", prompt="hi", max_tokens=15, ignore_eos=True, stream=True)
    received = connection.recv(4096)
    process.send_signal(signal.SIGTERM)
    while piece := connection.recv(4096):
        received += piece
    assert b"[DONE]" in received
    assert f'"finish_reason":"{finish}"'.encode() in received
    assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    process, live = start(60.0)
    connection = live.begin("/v1/completions", prompt="hi", max_tokens=120, ignore_eos=True, stream=True)
    connection.recv(4096)
    process.send_signal(signal.SIGTERM)
    live.wait_until(lambda: _refuses(live))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM


def _refuses(live: LiveServer) -> bool:
    try:
        live.send("GET", "/health")
    except OSError:
        return True
    return False
