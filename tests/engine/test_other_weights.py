"""Other weights come in the place of those that are served, and every answer is of one model alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.engine.launch import launch_engine
from paceline.engine.load import LoadedEngine
from paceline.engine.service import AsyncEngine, EngineState, RequestStream
from paceline.errors import CheckpointError, ConfigError, EngineUnavailable
from paceline.sampling_params import SamplingParams
from paceline.types import FinishReason, StepPlan, StepResult
from support.fake_runner import FakeRunner
from support.served import served
from support.small_text import small_engine

PATIENCE = 60.0


class UnhurriedRunner(FakeRunner):
    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.003)
        return super().execute(plan)


def old() -> LoadedEngine:
    return small_engine(UnhurriedRunner(64, 8, 8, 259))


def new() -> LoadedEngine:
    """Another model: its tokens are those of a smaller vocabulary."""
    return small_engine(UnhurriedRunner(64, 8, 8, 128))


@asynccontextmanager
async def engine_of_two_models() -> AsyncIterator[AsyncEngine]:
    engine = served(old(), old, {"new": new, "old": old})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def begin(engine: AsyncEngine, request_id: str = "r", max_tokens: int = 40) -> RequestStream:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return await engine.submit(list(b"what is it?"), params, request_id=request_id)


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def answer(engine: AsyncEngine) -> list[int]:
    return await tokens_of(await begin(engine))


@dataclass(frozen=True)
class Answers:
    """What each model answers, alone."""

    of_old: list[int]
    of_new: list[int]


def run(scene: Callable[[AsyncEngine, Answers], Awaitable[None]]) -> None:
    async def within_patience() -> None:
        async with engine_of_two_models() as engine:
            of_old = await answer(engine)
            await engine.load_weights("new")
            of_new = await answer(engine)
            await engine.load_weights("old")
            assert of_old != of_new
            await asyncio.wait_for(scene(engine, Answers(of_old, of_new)), PATIENCE)

    asyncio.run(within_patience())


async def reaches(engine: AsyncEngine, state: EngineState) -> None:
    while engine.state is not state:
        await asyncio.sleep(0.001)


def test_what_is_in_flight_ends_with_the_old_weights_and_what_comes_meanwhile_is_refused() -> None:
    async def scene(engine: AsyncEngine, answers: Answers) -> None:
        streams = [await begin(engine, f"r{i}") for i in range(12)]
        loading = asyncio.create_task(engine.load_weights("new"))
        await reaches(engine, EngineState.LOADING)
        for refused in (begin(engine, "late"), engine.load_weights("new"), engine.sleep(), engine.wake_up()):
            with pytest.raises(EngineUnavailable, match="the engine is loading"):
                await refused
        assert [await tokens_of(stream) for stream in streams] == [answers.of_old] * 12
        await loading
        assert (engine.state, engine.model_name) == (EngineState.RUNNING, "new")
        assert await answer(engine) == answers.of_new
        assert engine.recoveries == []

    run(scene)


def test_running_answers_can_be_ended_instead() -> None:
    async def scene(engine: AsyncEngine, answers: Answers) -> None:
        stream = await begin(engine, max_tokens=400)
        await anext(stream)
        await engine.load_weights("new", abort_running=True)
        assert [delta async for delta in stream][-1].finish_reason is FinishReason.ABORT
        assert await answer(engine) == answers.of_new

    run(scene)


def test_a_sleeping_engine_wakes_with_the_new_weights_unless_somebody_waits_for_the_old() -> None:
    async def scene(engine: AsyncEngine, answers: Answers) -> None:
        stream = await begin(engine)
        await engine.sleep()
        with pytest.raises(EngineUnavailable, match="1 requests wait"):
            await engine.load_weights("new")
        await engine.wake_up()
        assert await tokens_of(stream) == answers.of_old
        await engine.sleep()
        await engine.load_weights("new")
        assert await answer(engine) == answers.of_new
        await engine.sleep()
        await engine.wake_up()
        assert await answer(engine) == answers.of_new, "a successor has the weights that were loaded last"

    run(scene)


@pytest.mark.parametrize("asleep", [False, True])
def test_weights_that_cannot_be_loaded_leave_the_old_ones_served(asleep: bool) -> None:
    async def scene(engine: AsyncEngine, answers: Answers) -> None:
        if asleep:
            await engine.sleep()
        with pytest.raises(CheckpointError, match="missing: no such file"):
            await engine.load_weights("missing")
        assert await answer(engine) == answers.of_old
        assert (engine.state, engine.model_name) == (EngineState.RUNNING, "old")

    run(scene)


def test_a_prompt_made_for_the_old_weights_is_not_given_to_the_new() -> None:
    async def scene(engine: AsyncEngine, _: Answers) -> None:
        before = engine.info
        await engine.load_weights("new")
        with pytest.raises(EngineUnavailable, match="other weights were loaded"):
            await engine.submit([1], SamplingParams(max_tokens=1), request_id="r", model=before)

    run(scene)


def test_the_front_can_stop_while_it_waits_for_running_answers() -> None:
    async def scene(engine: AsyncEngine, _: Answers) -> None:
        stream = await begin(engine, max_tokens=400)
        loading = asyncio.create_task(engine.load_weights("new"))
        await reaches(engine, EngineState.LOADING)
        await engine.stop()
        with pytest.raises(EngineUnavailable, match="stopped"):
            await loading
        assert [delta async for delta in stream][-1].finish_reason is FinishReason.ABORT

    run(scene)


def test_an_engine_process_gives_its_place_to_another(smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.symlink_to(smollm2_path)
    config = EngineConfig(str(smollm2_path), num_threads=1, max_model_len=64, num_kv_blocks=16, max_num_seqs=4, seed=1)

    async def greedy(engine: AsyncEngine) -> tuple[str, list[int]]:
        ids = engine.encode_prompt("Once upon a time")
        stream = await engine.submit(ids, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0), request_id="r")
        return engine.model_name, await tokens_of(stream)

    async def scene() -> None:
        engine = launch_engine(config)
        await engine.start()
        first, pid = await greedy(engine), engine._link.pid  # type: ignore[attr-defined]
        await engine.load_weights(str(other))
        assert not Path(f"/proc/{pid}").exists()
        assert await greedy(engine) == (str(other), first[1])
        with pytest.raises((CheckpointError, ConfigError), match="no-such"):
            await engine.load_weights(str(tmp_path / "no-such"))
        assert (await greedy(engine))[0] == str(other)
        await engine.load_weights(str(smollm2_path))
        assert await greedy(engine) == first
        await engine.stop()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
