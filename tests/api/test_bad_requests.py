"""Whatever a client sends: a clear refusal that names the field, and the next request works."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.api.openai.json_text import parse_object
from paceline.errors import RequestError
from support.fake_runner import FakeRunner
from support.live_server import LiveServer, live_server
from support.small_text import small_engine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine(FakeRunner(64, 8, 8, 259)), max_body_bytes=100_000) as live:
        yield live


@pytest.fixture(autouse=True)
def next_request_works(server: LiveServer) -> Iterator[None]:
    yield
    reply = server.post(PLAIN, prompt="canary", max_tokens=3, seed=1)
    assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 3)
    server.wait_until(lambda: server.num_live == 0)


def refused(server: LiveServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused, in the shape that all errors have."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = server.send("POST", path, data)
    assert reply.status == status, reply.data[:500]
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) == {"error"}
    error: dict[str, Any] = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 1000
    return error


NOT_A_NUMBER = [True, "5", [1], {"a": 1}]
BOTH: list[tuple[str, Any]] = [
    *[("temperature", bad) for bad in [*NOT_A_NUMBER, -0.1, 2.1, 10**400, -(10**400)]],
    *[("top_p", bad) for bad in [*NOT_A_NUMBER, -0.1, 1.1]],
    *[("min_p", bad) for bad in [*NOT_A_NUMBER, -0.1, 1.1]],
    *[("top_k", bad) for bad in [*NOT_A_NUMBER, -2, 1.5]],
    *[("presence_penalty", bad) for bad in [*NOT_A_NUMBER, -2.1, 2.1]],
    *[("frequency_penalty", bad) for bad in [*NOT_A_NUMBER, -2.1, 2.1]],
    *[("repetition_penalty", bad) for bad in [*NOT_A_NUMBER, 0, -1, 1e-38]],
    *[("seed", bad) for bad in [*NOT_A_NUMBER, 0.5, 2**63, -(2**63) - 1]],
    *[("n", bad) for bad in [*NOT_A_NUMBER, 0, -1, 129, 2.0]],
    *[("max_tokens", bad) for bad in [*NOT_A_NUMBER, -1, 0, 1.0]],
    *[("max_completion_tokens", bad) for bad in [*NOT_A_NUMBER, -1, 0]],
    *[("min_tokens", bad) for bad in [*NOT_A_NUMBER, -1]],
    *[("stop", bad) for bad in [5, True, [""], "", [1], {"a": 1}, ["x"] * 17, "x" * 257, [["a"]]]],
    *[("stop_token_ids", bad) for bad in [5, "x", ["1"], [-1], [259], [True], [1.0], [0] * 1025]],
    *[("bad_words", bad) for bad in [5, "x", [1], [""], ["w"] * 257]],
    *[("logit_bias", bad) for bad in [5, [], {"x": 1}, {"1": "2"}, {"1": 101}, {"1": True}, {"259": 1}, {"-1": 1}]],
    ("logit_bias", {"1": 10**400}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    *[("allowed_token_ids", bad) for bad in [[], 5, [259], ["1"], [-1]]],
    *[("prompt_logprobs", bad) for bad in [True, "1", -2, 21, -1]],
    *[("truncate_prompt_tokens", bad) for bad in [0, -1, "1", True]],
    *[("temp_scaled_logprobs", bad) for bad in [1, "true"]],
    *[("top_p_normalized_logprobs", bad) for bad in [1, "true"]],
    *[("include_stop_str_in_output", bad) for bad in [1, "true"]],
    *[("ignore_eos", bad) for bad in [1, "true"]],
    *[("skip_special_tokens", bad) for bad in [1, "true"]],
    *[("return_token_ids", bad) for bad in [1, "true"]],
    *[("stream", bad) for bad in [1, "true", {}]],
    *[("stream_options", bad) for bad in [1, "x", [], {"include_usage": True}]],
    *[("model", bad) for bad in [5, ["small"]]],
    *[("request_id", bad) for bad in [5, "", "x" * 129]],
    *[("priority", bad) for bad in ["1", True, 2**31]],
    *[("cache_salt", bad) for bad in ["", 5]],
    *[("best_of", bad) for bad in [2, "1", True]],
    *[
        ("response_format", bad)
        for bad in [
            "text",
            {},
            {"type": "x"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
        ]
    ],
    *[("structured_outputs", bad) for bad in ["x", {}, {"json": {}, "regex": "a"}]],
    *[("guided_json", bad) for bad in [{"type": "x"}, "{", 5, False, {"not": {}}, {"$ref": "http://x.y/z"}]],
    *[("guided_regex", bad) for bad in ["((", "", "a(?=b)", 5]],
    *[("guided_choice", bad) for bad in ["x", [], [5], [""], ["a"] * 1025]],
    *[("guided_grammar", bad) for bad in ["start: x", "root ::= x", "nothing", "start: " + "(" * 9999, 'start: ""']],
    *[("structural_tag", bad) for bad in [{}, {"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}]],
    # What this server does not do
    ("tools", "x"),
    *[
        ("tools", [{"type": "function", "function": bad}])
        for bad in [None, {}, {"name": ""}, {"name": "a b"}, {"name": "f", "parameters": []}]
    ],
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
    *[("tool_choice", bad) for bad in ["f", 5, {}, {"type": "function"}]],
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("reasoning", {"effort": "low"}),
    *[("reasoning_max_tokens", bad) for bad in [*NOT_A_NUMBER, -1, 1.5]],
    *[("thinking_token_budget", bad) for bad in [*NOT_A_NUMBER, -1, 1.5]],
    ("reasoning_max_tokens", 10),  # the model does not think
    ("thinking_token_budget", 10),
    ("enable_thinking", True),
    ("reasoning_effort", "low"),
    *[("early_stop", bad) for bad in [True, 5, "x", [3, 0.9], {"windows": 3}]],
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("suffix", "end"),
    ("lora_request", {"name": "x"}),
    ("use_beam_search", True),
    ("length_penalty", 2),
    ("chat_template", "{{ x }}"),
    ("return_tokens_as_token_ids", True),
    ("spaces_between_special_tokens", True),
    ("kv_transfer_params", {}),
]


@pytest.mark.parametrize(("field", "value"), BOTH, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_field_with_a_wrong_value_is_named(server: LiveServer, path: str, field: str, value: Any) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, {**prompt, field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("logprobs", bad) for bad in [1, "true", {}]],
        *[("top_logprobs", bad) for bad in ["1", True, 1]],
        *[("echo", bad) for bad in [True]],
        *[("add_special_tokens", bad) for bad in [True]],
        *[("continue_final_message", bad) for bad in [True, "x"]],
        ("add_generation_prompt", 1),
        *[("chat_template_kwargs", bad) for bad in [5, [], {"messages": []}, {"bos_token": "x"}, {"tools": [1]}]],
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_chat_field_with_a_wrong_value_is_named(server: LiveServer, field: str, value: Any) -> None:
    error = refused(server, CHAT, {"messages": [USER], field: value})
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(
    ("name", "value"),
    [*[("window", bad) for bad in [*NOT_A_NUMBER, 0, -1, 2.5, 2**31]],
     *[("threshold", bad) for bad in [*NOT_A_NUMBER, -0.1, 1.1]]],
)  # fmt: skip
def test_a_wrong_early_stop_is_named_to_the_part(server: LiveServer, path: str, name: str, value: Any) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, {**prompt, "early_stop": {name: value}})
    assert error["param"] == f"early_stop.{name}"
    assert error["message"].startswith(f"early_stop.{name} must be ")


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_two_names_of_one_field_must_agree(server: LiveServer, path: str) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    error = refused(server, path, {**prompt, "reasoning_max_tokens": 5, "thinking_token_budget": 6})
    assert error["param"] == "thinking_token_budget"
    assert "differ" in error["message"]


@pytest.mark.parametrize("count", [-1, -2, 21, 10**9, 1.5])
def test_too_many_top_logprobs_are_named_as_the_caller_spelt_them(server: LiveServer, count: Any) -> None:
    error = refused(server, CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": count})
    assert error["param"] == "top_logprobs"
    assert error["message"].startswith("top_logprobs ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("logprobs", bad) for bad in [True, "1", -1, -2, 21, [1]]],
        *[("echo", bad) for bad in [1, "true"]],
        *[("add_special_tokens", bad) for bad in [1, "true"]],
        *[("parse_special", bad) for bad in [1, "true"]],
    ],
)
def test_a_completion_field_with_a_wrong_value_is_named(server: LiveServer, field: str, value: Any) -> None:
    error = refused(server, PLAIN, {"prompt": "hi", field: value})
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, True, {}, {"a": 1}, "", [], [[]], [""], ["a", ""], ["a", 1], [1, "a"], [[1], 2], [[1], "a"], [1.0],
        [True], [-1], [259], [2**70], [[1, 259]], [[[1]]], [None], "x" * 200, [5] * 200, ["ok", "x" * 200],
        ["x"] * 1025, [[1]] * 1025,
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_a_wrong_prompt_is_refused(server: LiveServer, prompt: Any) -> None:
    error = refused(server, PLAIN, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "prompt" in error["message"]


def test_a_prompt_beyond_the_context_is_told_the_numbers(server: LiveServer) -> None:
    error = refused(server, PLAIN, {"prompt": [65] * 200, "max_tokens": 7})
    assert all(number in error["message"] for number in ("200", "7", "128"))
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": "x" * 200}]})
    assert error["param"] == "messages"
    assert "128" in error["message"]


def test_a_missing_prompt_is_named(server: LiveServer) -> None:
    assert refused(server, PLAIN, {})["param"] == "prompt"
    assert refused(server, CHAT, {})["param"] == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        None, 5, "hi", {}, [], [None], [5], ["hi"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}], [{"role": 5, "content": "hi"}], [{"role": [], "content": "hi"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"role": "user", "content": {}}],
        [{"role": "user", "content": ["hi"]}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": [], "text": "x"}]}],
        [{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    ],
    ids=lambda value: repr(value)[:50],
)  # fmt: skip
def test_wrong_messages_are_refused(server: LiveServer, messages: Any) -> None:
    error = refused(server, CHAT, {"messages": messages})
    assert error["param"].startswith("messages")
    assert error["message"].startswith("messages")


def test_min_tokens_beyond_max_tokens_is_refused(server: LiveServer) -> None:
    error = refused(server, PLAIN, {"prompt": "hi", "min_tokens": 20})
    assert error["param"] == "min_tokens"
    assert "16" in error["message"]


def test_prompts_times_choices_are_limited(server: LiveServer) -> None:
    error = refused(server, PLAIN, {"prompt": ["x"] * 100, "n": 100})
    assert error["param"] == "n"
    assert "1024" in error["message"]


def test_add_generation_prompt_excludes_continuing(server: LiveServer) -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}
    error = refused(server, CHAT, {"messages": [USER, {"role": "assistant", "content": "x"}], **both})
    assert error["param"] == "continue_final_message"


def test_streamed_prompt_logprobs_are_refused(server: LiveServer) -> None:
    for path, prompt in ((CHAT, {"messages": [USER]}), (PLAIN, {"prompt": "hi"})):
        assert refused(server, path, {**prompt, "stream": True, "prompt_logprobs": 1})["param"] == "prompt_logprobs"


@pytest.mark.parametrize("options", [5, {"include_usage": 1}, {"include_usage": "yes"}, {"continuous_usage_stats": 0}])
def test_wrong_stream_options_are_refused(server: LiveServer, options: Any) -> None:
    error = refused(server, PLAIN, {"prompt": "hi", "stream": True, "stream_options": options})
    assert error["param"].startswith(("stream_options", "include_usage", "continuous_usage_stats"))


def test_a_stream_that_is_refused_has_the_status_of_its_error(server: LiveServer) -> None:
    refused(server, PLAIN, {"prompt": [259], "stream": True})
    refused(server, CHAT, {"messages": [{"role": "user", "content": "x" * 200}], "stream": True})
    refused(server, PLAIN, {"prompt": "hi", "model": "other", "stream": True}, status=404)


NOT_JSON = [
    b"", b"{", b"nonsense", b"{'prompt': 'hi'}", b'{"prompt": "hi"} trailing', b'{"prompt": "hi",}', b"\xff\xfe",
    b'{"prompt": "\xff"}', b'\xef\xbb\xbf{"prompt": "hi"}', b'{"prompt": "hi\x00"}', b'{"prompt": "a\nb"}',
    b'{"prompt": "hi", "temperature": NaN}', b'{"prompt": "hi", "temperature": Infinity}',
    b'{"prompt": "hi", "temperature": -Infinity}', b'{"prompt": "hi", "x": ' + b"1" * 5000 + b"}",
    b'{"prompt": "\\ud800"}', b'{"prompt": "hi", "x": {"y": ["\\uDC00"]}}', b'{"prompt": "hi", "prompt": "ho"}',
    b'{"prompt": "hi", "x": {"a": 1, "a": 2}}', b"[" * 50_000, b'{"x":' * 10_000, b"[" * 400 + b"]" * 400,
    *[b'{"prompt": "hi", "x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (400, 9000)],
]  # fmt: skip
NO_OBJECT = [b"null", b"5", b"[]", b'"hi"', b"true", b'[{"prompt": "hi"}]']


@pytest.mark.parametrize("data", [*NOT_JSON, *NO_OBJECT], ids=lambda data: repr(data)[:40])
@pytest.mark.parametrize("path", [CHAT, PLAIN, "/tokenize", "/detokenize", "/v1/abort"])
def test_a_body_that_is_no_json_object_is_refused(server: LiveServer, path: str, data: bytes) -> None:
    assert "body" in refused(server, path, data)["message"]


def test_numbers_too_large_for_a_float_are_refused(server: LiveServer) -> None:
    assert refused(server, PLAIN, b'{"prompt": "hi", "temperature": 1e999}')["param"] == "temperature"
    assert refused(server, PLAIN, b'{"prompt": "hi", "logit_bias": {"1": -1e999}}')["param"] == "logit_bias"


def test_a_body_that_is_too_large_is_refused(server: LiveServer) -> None:
    error = refused(server, PLAIN, {"prompt": "x" * 200_000}, status=413)
    assert "100000" in error["message"]


def test_a_body_of_too_many_values_is_refused() -> None:
    with pytest.raises(RequestError, match="1500000 commas"):
        parse_object(b'{"prompt": [' + b"1," * 1_500_000 + b"1]}")


def test_a_body_of_another_kind_is_refused(server: LiveServer) -> None:
    reply = server.send("POST", PLAIN, b'{"prompt": "hi"}', {"Content-Type": "text/plain"})
    assert reply.status == 415
    assert "application/json" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/chat", 404),
        ("GET", CHAT, 405),
        ("PUT", PLAIN, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/a/b", 404),
    ],
)
def test_wrong_routes_have_the_shape_of_all_errors(server: LiveServer, method: str, path: str, status: int) -> None:
    reply = server.send(method, path)
    assert reply.status == status
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_model_is_not_found(server: LiveServer) -> None:
    for path, prompt in ((CHAT, {"messages": [USER]}), (PLAIN, {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})):
        error = refused(server, path, {**prompt, "model": "other"}, status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1, None]}, "tokens"),
        ("/v1/abort", {}, "request_id"),
        ("/v1/abort", {"request_id": 5}, "request_id"),
    ],
)
def test_the_small_routes_name_the_field_too(server: LiveServer, path: str, body: Any, param: str) -> None:
    error = refused(server, path, body)
    assert error["param"] == param
    assert param in error["message"]


def test_a_template_variable_may_have_any_name(server: LiveServer) -> None:
    for name in ("self", "cls", "kwargs", "conversation"):
        reply = server.post(CHAT, messages=[USER], max_tokens=1, chat_template_kwargs={name: 1})
        assert reply.status == 200, reply.data


def test_zero_is_not_false(server: LiveServer) -> None:
    assert refused(server, PLAIN, {"prompt": "a", "use_beam_search": 0})["param"] == "use_beam_search"
    assert refused(server, PLAIN, {"prompt": "a", "length_penalty": True})["param"] == "length_penalty"


def test_a_path_with_a_slash_too_many_is_not_found(server: LiveServer) -> None:
    assert refused(server, PLAIN + "/", {"prompt": "a"}, 404)["type"] == "invalid_request_error"


def test_rules_that_lead_into_a_corner_are_the_callers_mistake() -> None:
    with live_server(small_engine()) as live:
        words = [first + second for first in "ab" for second in "ab"]
        body = {"prompt": "a", "max_tokens": 9, "allowed_token_ids": [97, 98], "bad_words": words}
        assert "no token is left" in refused(live, PLAIN, body)["message"]
        assert live.post(PLAIN, prompt="a", max_tokens=2).status == 200


def test_a_client_that_leaves_inside_its_body_is_no_failure_of_ours(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 500\r\n\r\n{"prompt": '
        )
    assert server.post(PLAIN, prompt="a", max_tokens=2).status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
