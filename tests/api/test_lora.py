"""Adapters by the names that callers ask for: offline, over HTTP, on the command line."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from paceline import LLM, SamplingParams
from paceline.api.cli.main import main
from paceline.api.server_config import check_adapter_names
from paceline.config import EngineConfig
from paceline.engine.launch import launch_engine
from paceline.errors import ConfigError, RequestError
from paceline.tensors import Encoding
from support.live_server import LiveServer, live_server
from support.small_text import small_engine
from support.tiny_adapters import adapt
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, oracle_logits, random_prompt

PROMPT = "a prompt that is longer than a block"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(small_engine(adapters=True), served_model_names=("small", "org/small")) as live:
        yield live


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.from_engine(small_engine(adapters=True), seed=1) as llm:
        yield llm


# ---- offline


def test_each_prompt_may_have_an_adapter_of_its_own(llm: LLM) -> None:
    """In one batch as alone, on one prefix, whose blocks are not shared."""
    names = [None, "wide", "few", "wide", None]
    together = llm.generate([PROMPT] * 5, GREEDY, lora_request=names)
    for name, output in zip(names, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate(PROMPT, GREEDY, lora_request=name)
        assert alone.num_cached_tokens == 0
        assert output.outputs == alone.outputs
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 3


def test_a_model_with_adapters_answers_as_one_without(llm: LLM) -> None:
    with LLM.from_engine(small_engine(), seed=1) as plain:
        expected = plain.generate(PROMPT, GREEDY)[0].outputs
    assert llm.generate(PROMPT, GREEDY)[0].outputs == expected
    beside = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=["few", None])
    assert beside[1].outputs == expected


def test_a_prefix_is_found_again_with_the_same_adapter_only(llm: LLM) -> None:
    cached = [
        llm.generate(PROMPT, GREEDY, lora_request=name)[0].num_cached_tokens
        for name in ("wide", "wide", "few", None, "few", None)
    ]
    assert cached == [0, 32, 0, 0, 32, 32]


def test_conversations_and_streams_take_an_adapter(llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    answers = {name: llm.chat(conversation, GREEDY, lora_request=name)[0].outputs[0] for name in (None, "wide")}
    assert answers[None].text != answers["wide"].text
    streamed = "".join(delta.text for delta in llm.stream(conversation, GREEDY, lora_request="wide"))
    assert streamed == answers["wide"].text


def test_an_adapter_that_is_not_there_is_refused(llm: LLM) -> None:
    for wrong in ("Wide", "", "small"):
        with pytest.raises(RequestError, match=r"no adapter has the name .*; there is wide, few") as caught:
            llm.generate(PROMPT, GREEDY, lora_request=wrong)
        assert caught.value.param == "lora_request"
    with pytest.raises(RequestError, match="lora_request is the name of an adapter, not int"):
        llm.generate(PROMPT, GREEDY, lora_request=5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no adapter has the name 5"):
        llm.generate([PROMPT], GREEDY, lora_request=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="there are 1 prompts, but 2 lora_requests"):
        llm.generate([PROMPT], GREEDY, lora_request=["wide", "few"])
    with LLM.from_engine(small_engine()) as plain, pytest.raises(RequestError, match="there is none"):
        plain.generate(PROMPT, GREEDY, lora_request="wide")
    assert llm.generate(PROMPT, GREEDY, lora_request="wide")[0].finished


def test_an_adapter_from_its_files_answers_as_in_peft(tmp_path: Path) -> None:
    """All the way: a GGUF file, two adapters, one engine."""
    prompt, params = random_prompt(9), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.F32)
    adapted = {name: adapt(make_model("llama"), seed) for name, seed in (("one", 1), ("two", 2))}
    for name, model in adapted.items():
        model.save_pretrained(tmp_path / name)
    folders = {name: str(tmp_path / name) for name in adapted}
    names = ["one", None, "two"]
    with LLM(str(path), lora=folders, ops="reference", num_kv_blocks=8) as llm:
        outputs = llm.generate([prompt] * 3, params, lora_request=names)
    said = [output.outputs[0].token_ids for output in outputs]
    for tokens, model in zip(said, [adapted["one"], make_model("llama"), adapted["two"]], strict=True):
        expected = oracle_logits(model, prompt + tokens).argmax(axis=1)
        assert tokens == expected[len(prompt) - 1 : -1].tolist()
    assert len({tuple(tokens) for tokens in said}) == 3

    async def with_a_loss() -> list[list[int]]:
        config = EngineConfig(str(path), lora=folders, ops="reference", num_kv_blocks=8)
        engine = launch_engine(config)
        await engine.start()
        streams = [await engine.submit(prompt, params, request_id=f"{i}", adapter=name) for i, name in enumerate(names)]
        first = await anext(streams[0])
        os.kill(engine._link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        deltas = [[first], [], []]
        for stream, mine in zip(streams, deltas, strict=True):
            mine += [delta async for delta in stream]
        assert len(engine.recoveries) == 1
        await engine.stop()
        return [[token for delta in mine for token in delta.token_ids] for mine in deltas]

    assert asyncio.run(with_a_loss()) == said


# ---- over HTTP


def test_an_adapter_is_a_model_to_the_client(server: LiveServer, llm: LLM) -> None:
    client = server.client()
    for model, adapter in (("small", None), ("wide", "wide"), ("few", "few"), ("org/small", None)):
        expected = llm.generate(PROMPT, GREEDY, lora_request=adapter)[0].outputs[0]
        completion = client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=2, extra_body={"ignore_eos": True}
        )
        assert completion.model == model
        assert completion.choices[0].text == expected.text
        assert completion.choices[0].logprobs is not None
        logprobs = np.array(completion.choices[0].logprobs.token_logprobs)
        assert logprobs.tolist() == [entry.logprob for entry in expected.logprobs or ()]


def test_chats_are_streamed_with_an_adapter(server: LiveServer, llm: LLM) -> None:
    conversation: list[Any] = [{"role": "user", "content": "hi"}]
    chunks = list(
        server.client().chat.completions.create(
            model="few",
            messages=conversation,
            temperature=0,
            max_tokens=12,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == llm.chat(conversation, GREEDY, lora_request="few")[0].outputs[0].text
    assert {chunk.model for chunk in chunks} == {"few"}


def test_the_models_list_tells_adapters_apart(server: LiveServer) -> None:
    models = server.send("GET", "/v1/models").json["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("small", "small", None),
        ("org/small", "small", None),
        ("wide", "adapters/wide", "small"),
        ("few", "adapters/few", "small"),
    ]
    assert server.send("GET", "/v1/models/few").json["parent"] == "small"
    assert [model.id for model in server.client().models.list()] == ["small", "org/small", "wide", "few"]


def test_other_names_are_no_models(server: LiveServer) -> None:
    client = server.client()
    for name in ("Wide", "adapters/wide", "small/wide"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=name, prompt="x")
        assert caught.value.code == "model_not_found"
        assert "there is small, org/small, wide, few" in caught.value.message
        assert server.send("GET", f"/v1/models/{name}").status == 404
    for field in ("lora_request", "lora_adapter"):
        assert server.post("/v1/completions", prompt="x", **{field: "wide"}).status == 400


def test_tokens_can_be_counted_under_the_name_of_an_adapter(server: LiveServer) -> None:
    assert server.post("/tokenize", model="wide", prompt="abc").json["tokens"] == [97, 98, 99]


def test_an_adapter_cannot_have_the_name_of_the_model() -> None:
    with pytest.raises(ConfigError, match="the model itself is served as 'wide'"):
        check_adapter_names({"few": "a", "wide": "b"}, ("small", "wide"))
    with (
        pytest.raises(ConfigError, match="give the adapter another name"),
        live_server(small_engine(adapters=True), served_model_names=("few",)),
    ):
        pass


# ---- on the command line


def test_a_bad_adapter_is_told_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.F32)
    assert main(["serve", str(path), "--lora", f"sql={tmp_path / 'nowhere'}"]) == 1
    assert capsys.readouterr().err == f"paceline: {tmp_path / 'nowhere'}: no such folder\n"
    assert main(["serve", str(path), "--lora", f"{path}={tmp_path}"]) == 1
    assert "the model itself is served as" in capsys.readouterr().err


def test_one_answer_has_one_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.F32)
    assert main(["run", str(path), "hi", "--lora", "a=x", "--lora", "b=y"]) == 1
    assert "an answer can have one adapter, but 2 were given" in capsys.readouterr().err
    adapt(make_model("llama")).save_pretrained(tmp_path / "adapter")
    said = {}
    for adapter in ([], ["--lora", f"tuned={tmp_path / 'adapter'}"]):
        assert main(["run", str(path), "t5t7t9t11", "--raw", "--max-tokens", "8", "--num-kv-blocks=4", *adapter]) == 0
        said[bool(adapter)] = capsys.readouterr().out
    assert said[True] != said[False]
