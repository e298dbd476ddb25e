"""Engines are lost and replaced, and nobody can tell from the answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.launch import launch_engine
from paceline.engine.links import EngineProcess
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.service import AsyncEngine, EngineState
from paceline.errors import ENGINE_LOST, CheckpointError, ConfigError, EngineUnavailable, QueueFull
from paceline.sampling_params import SamplingParams
from paceline.structured_outputs import StructuredOutputs
from paceline.types import FinishReason
from support.fragile_engine import COMMAND
from support.small_text import small_engine

PATIENCE = 60.0
CONFIG = EngineConfig("small", seed=0, max_num_seqs=8, engine_timeout=120.0)


@asynccontextmanager
async def fragile(**settings: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig("small", seed=0, max_num_seqs=8, **settings)
    link = EngineProcess(config, COMMAND)
    link.wait_ready()
    engine = AsyncEngine(small_engine().info, config, link, lambda again: EngineProcess(again, COMMAND))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answer(engine: AsyncEngine, text: str, request_id: str, **params: Any) -> list[ChoiceDelta]:
    stream = await engine.submit(
        list(text.encode()),
        SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 1, **params}),
        request_id=request_id,
    )
    return [delta async for delta in stream]


def tokens_of(deltas: list[ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def within_patience() -> None:
        await asyncio.wait_for(scene(), PATIENCE)

    asyncio.run(within_patience())


@pytest.mark.parametrize(("text", "why"), [("kills!", "signal 9"), ("raises#", "MemoryError: the machine is full")])
def test_a_request_that_no_engine_survives_is_given_up_and_the_others_go_on(text: str, why: str) -> None:
    async def scene() -> None:
        async with fragile() as engine:
            alone = [tokens_of(await answer(engine, f"good {i}", "alone")) for i in range(4)]
            good = [asyncio.create_task(answer(engine, f"good {i}", f"g{i}")) for i in range(4)]
            bad = await answer(engine, text, "bad")
            assert bad[-1].finish_reason is FinishReason.ERROR
            assert (bad[-1].error or "").startswith(ENGINE_LOST)
            assert why in (bad[-1].error or "")
            assert [tokens_of(await each) for each in good] == alone
            assert engine.state is EngineState.RUNNING
            assert len(engine.recoveries) == 4
            assert tokens_of(await answer(engine, "good 0", "after")) == alone[0]

    run(scene)


def test_several_requests_that_kill_are_found_one_by_one() -> None:
    async def scene() -> None:
        async with fragile() as engine:
            alone = tokens_of(await answer(engine, "good", "alone"))
            bad = [asyncio.create_task(answer(engine, "bad!", f"b{i}")) for i in range(6)]
            good = [asyncio.create_task(answer(engine, "good", f"g{i}")) for i in range(6)]
            assert all([(await each)[-1].finish_reason is FinishReason.ERROR for each in bad])
            assert all([tokens_of(await each) == alone for each in good])
            assert engine.in_flight() == []

    run(scene)


def test_an_engine_that_hangs_is_replaced() -> None:
    async def scene() -> None:
        async with fragile(engine_timeout=1.0) as engine:
            alone = tokens_of(await answer(engine, "good", "alone"))
            good = asyncio.create_task(answer(engine, "good", "g"))
            bad = asyncio.create_task(answer(engine, "hangs?", "bad"))
            deltas = await bad
            assert "no sign of life for 1 s" in (deltas[-1].error or "")
            assert tokens_of(await good) == alone

    run(scene)


def test_kills_at_random_moments_change_no_answer(smollm2_path: Path) -> None:
    """Prompts in chunks, choices, log-probabilities, stop strings, structured output and an early stop."""
    chat = "<|im_start|>user\nTell me of {}.<|im_end|>\n<|im_start|>assistant\n"
    wishes = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=25, temperature=1.0, seed=5, n=2, logprobs=2),
        SamplingParams(max_tokens=40, temperature=0.7, seed=6, stop=[" the ", "."], prompt_logprobs=1),
        SamplingParams(max_tokens=30, structured_outputs=StructuredOutputs(json_object=True), temperature=1.0, seed=7),
        SamplingParams(max_tokens=40, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=20),
        SamplingParams(max_tokens=60, early_stop={"window": 5, "threshold": 0.2}),
    ]
    topics = ["rain", "the sea " * 30, "an old house", "numbers", "bread"]
    jobs = [(chat.format(topics[i % len(topics)]), wishes[i % len(wishes)]) for i in range(12)]
    config = EngineConfig(
        str(smollm2_path), num_threads=1, max_num_batched_tokens=64, num_kv_blocks=64, max_model_len=1024,
        max_num_seqs=8, seed=1,
    )  # fmt: skip

    async def answers(kills: int) -> list[list[Any]]:
        engine = launch_engine(config)
        await engine.start()
        ids = [engine.encode_prompt(text) for text, _ in jobs]
        killed = 0

        async def one(number: int) -> list[Any]:
            stream = await engine.submit(ids[number], jobs[number][1], request_id=str(number))
            deltas = [delta async for delta in stream]
            choices = []
            for index in range(jobs[number][1].n):
                mine = [delta for delta in deltas if delta.index == index]
                choices.append(
                    (
                        "".join(delta.text for delta in mine),
                        tokens_of(mine),
                        [entry for delta in mine for entry in delta.logprobs],
                        mine[-1].finish_reason,
                        mine[-1].stop_reason,
                        mine[-1].error,
                    )
                )
            return [choices, stream.prompt_logprobs]

        async def kill() -> None:
            nonlocal killed
            while killed < kills:
                await asyncio.sleep(0.15 + 0.07 * killed)
                if engine.state is EngineState.RUNNING and engine.in_flight():
                    os.kill(engine._link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                    killed += 1

        killer = asyncio.create_task(kill())
        results = await asyncio.gather(*map(one, range(len(jobs))))
        killer.cancel()
        assert killed >= min(kills, 2)
        assert len(engine.recoveries) == killed
        await engine.stop()
        return results

    assert asyncio.run(answers(4)) == asyncio.run(answers(0))


def test_asleep_an_engine_has_no_process_and_what_was_in_flight_goes_on_afterwards() -> None:
    async def scene() -> None:
        async with fragile() as engine:
            alone = tokens_of(await answer(engine, "good", "alone"))
            stream = await engine.submit(
                list(b"good"), SamplingParams(max_tokens=40, ignore_eos=True, seed=1), request_id="r"
            )
            deltas = [await anext(stream)]
            pid = engine._link.pid  # type: ignore[attr-defined]
            await engine.sleep()
            assert engine.state is EngineState.SLEEPING
            assert not Path(f"/proc/{pid}").exists()
            for refused in (engine.sleep(), answer(engine, "x", "x")):
                with pytest.raises(EngineUnavailable, match="sleeping"):
                    await refused
            await engine.wake_up()
            assert engine.state is EngineState.RUNNING
            deltas += [delta async for delta in stream]
            assert tokens_of(deltas) == alone
            with pytest.raises(EngineUnavailable, match="running"):
                await engine.wake_up()

    run(scene)


def test_requests_that_come_while_the_engine_is_replaced_wait_for_it_and_the_queue_has_its_limit() -> None:
    async def scene() -> None:
        async with fragile(max_waiting=0) as engine:
            alone = tokens_of(await answer(engine, "good", "alone"))
            os.kill(engine._link.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            while engine.state is EngineState.RUNNING:
                await asyncio.sleep(0.001)
            waiting = [asyncio.create_task(answer(engine, "good", f"r{i}")) for i in range(8)]
            await asyncio.sleep(0.05)
            with pytest.raises(QueueFull, match="max_waiting is 0"):
                await answer(engine, "good", "late")
            assert all([tokens_of(await each) == alone for each in waiting])

    run(scene)


def test_an_engine_that_cannot_be_launched_again_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.service.RELAUNCH_SECONDS", 0.01)

    async def scene() -> None:
        link = EngineProcess(CONFIG, COMMAND)
        link.wait_ready()
        engine = AsyncEngine(
            small_engine().info, CONFIG, link, lambda again: EngineProcess(again, (sys.executable, "-c", "exit(3)"))
        )
        await engine.start()
        good = asyncio.create_task(answer(engine, "good", "g", max_tokens=100))
        await asyncio.sleep(0.05)
        os.kill(link.pid, signal.SIGKILL)
        deltas = await good
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert "exit status 3" in (deltas[-1].error or "")
        assert engine.state is EngineState.FAILED
        with pytest.raises(EngineUnavailable, match="exit status 3"):
            await answer(engine, "x", "x")
        await engine.stop()

    run(scene)


def test_the_engine_process_ends_with_its_parent() -> None:
    program = (
        "import sys, time\n"
        "from paceline.config import EngineConfig\n"
        "from paceline.engine.links import EngineProcess\n"
        f"link = EngineProcess(EngineConfig('small'), {COMMAND!r})\n"
        "link.wait_ready()\n"
        "print(link.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = Path(f"/proc/{int(parent.stdout.readline())}")
    assert engine.exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while engine.exists() and "Z" not in (engine / "stat").read_text():
        assert time.monotonic() < deadline, "the engine process has outlived its parent"
        time.sleep(0.02)


def test_what_cannot_be_loaded_is_told_by_the_engine_process(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 99999 exceeds"):
        launch_engine(EngineConfig(str(smollm2_path), max_model_len=99999))
    broken = tmp_path / "model.gguf"
    broken.write_bytes(smollm2_path.read_bytes()[:2_000_000])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        launch_engine(EngineConfig(str(broken)))
