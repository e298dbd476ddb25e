from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from paceline.engine.load import LoadedEngine
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.service import AsyncEngine, RequestStream
from paceline.errors import EngineUnavailable, QueueFull, RequestError
from paceline.sampling_params import SamplingParams
from paceline.types import FinishReason
from support.scripted_runner import ScriptedRunner, saying
from support.served import served
from support.small_text import small_engine

PROMPT = [1, 2, 3]


def scripted(text: str = "hello") -> tuple[AsyncEngine, LoadedEngine]:
    loaded = small_engine(ScriptedRunner(saying(len(PROMPT), text)))
    return served(loaded), loaded


def held(
    hold_at: int, *, max_num_seqs: int = 8, max_waiting: int | None = None
) -> tuple[AsyncEngine, LoadedEngine, threading.Event]:
    """An engine that says x for ever and stands still in a step until the event is set."""
    runner = ScriptedRunner(saying(len(PROMPT), "x" * 100), hold_at=hold_at)
    loaded = small_engine(runner, max_num_seqs=max_num_seqs)
    return served(loaded, max_waiting=max_waiting), loaded, runner.gate


async def collect(stream: RequestStream) -> list[ChoiceDelta]:
    return [delta async for delta in stream]


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def submit(engine: AsyncEngine, request_id: str = "r", **params: Any) -> RequestStream:
    return await engine.submit(PROMPT, SamplingParams(**params), request_id=request_id)


async def settled(loaded: LoadedEngine) -> None:
    """Wait until the engine has nothing left to do, and check its books."""
    scheduler = loaded.engine.scheduler
    for _ in range(500):
        if not scheduler.has_work():
            break
        await asyncio.sleep(0.01)
    scheduler.check_idle()
    assert not scheduler.has_work()
    assert scheduler.num_blocks_used == 0


def test_a_stream_brings_the_whole_answer() -> None:
    async def scene() -> None:
        engine, loaded = scripted()
        await engine.start()
        deltas = await collect(await submit(engine))
        assert text_of(deltas) == "hello"
        assert deltas[-1].finish_reason is FinishReason.STOP
        await settled(loaded)
        await engine.stop()

    asyncio.run(scene())


def test_an_engine_is_a_context_and_makes_ids_up() -> None:
    async def scene() -> None:
        engine, _ = scripted()
        async with engine:
            streams = [await engine.submit(PROMPT, SamplingParams()) for _ in range(2)]
            assert streams[0].request_id != streams[1].request_id
            assert [text_of(await collect(stream)) for stream in streams] == ["hello"] * 2
        with pytest.raises(EngineUnavailable, match="stopped"):
            await submit(engine)

    asyncio.run(scene())


def test_known_tokens_are_delivered_and_not_computed() -> None:
    async def scene() -> None:
        async with scripted()[0] as engine:
            whole = await collect(await submit(engine))
            tokens = [token for delta in whole for token in delta.token_ids]
            before = engine.stats.num_computed
            stream = await engine.submit(PROMPT, SamplingParams(), outputs=[tokens[:3]], num_cached_tokens=2)
            deltas = await collect(stream)
            assert [(delta.text, delta.token_ids) for delta in deltas] == [(d.text, d.token_ids) for d in whole]
            assert stream.num_cached_tokens == 2
            assert engine.stats.num_computed - before == len(PROMPT) + len(tokens) - 1

    asyncio.run(scene())


def test_many_streams_at_once_equal_their_solo_runs() -> None:
    async def answers(together: bool) -> list[list[ChoiceDelta]]:
        loaded = small_engine(num_blocks=30)
        engine = served(loaded)
        await engine.start()
        rng = random.Random(5)
        jobs = []
        for number in range(24):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=rng.randint(1, 30), n=1 + number % 2)
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
            jobs.append((prompt, params, f"r{number}"))

        async def run(job: tuple[list[int], SamplingParams, str]) -> list[ChoiceDelta]:
            return await collect(await engine.submit(job[0], job[1], request_id=job[2]))

        results = await asyncio.gather(*map(run, jobs)) if together else [await run(job) for job in jobs]
        await settled(loaded)
        await engine.stop()
        return [sorted(deltas, key=lambda delta: delta.index) for deltas in results]

    assert asyncio.run(answers(True)) == asyncio.run(answers(False))


def test_an_abort_ends_the_stream_and_frees_everything() -> None:
    async def scene() -> None:
        engine, loaded, gate = held(hold_at=3)
        await engine.start()
        stream = await submit(engine, max_tokens=100)
        first = await anext(stream)
        assert first.text == "x"
        stream.abort()
        stream.abort()
        gate.set()
        rest = await collect(stream)
        assert rest[-1].finish_reason is FinishReason.ABORT
        await settled(loaded)
        assert engine.abort("r") is False
        assert text_of(await collect(await submit(engine, max_tokens=3))) == "xxx"
        await engine.stop()

    asyncio.run(scene())


def test_a_cancelled_submission_leaves_nothing_behind() -> None:
    async def scene() -> None:
        engine, loaded = scripted("x" * 100)
        await engine.start()
        task = asyncio.create_task(submit(engine, max_tokens=100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(loaded)
        assert text_of(await collect(await submit(engine, max_tokens=2))) == "xx"
        await engine.stop()

    asyncio.run(scene())


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    async def scene() -> None:
        engine, _, gate = held(hold_at=2)
        await engine.start()
        stream = await submit(engine, max_tokens=20)
        with pytest.raises(RequestError, match="'r' is running"):
            await submit(engine)
        gate.set()
        assert text_of(await collect(stream)) == "x" * 20
        await engine.stop()

    asyncio.run(scene())


def test_a_full_queue_is_reported_before_the_request_is_accepted() -> None:
    async def scene() -> None:
        engine, loaded, gate = held(hold_at=1, max_num_seqs=1, max_waiting=1)
        await engine.start()
        submissions = [asyncio.create_task(submit(engine, f"r{i}", max_tokens=100)) for i in range(3)]
        # Of a request for several choices all are refused, or none.
        submissions.append(asyncio.create_task(submit(engine, "r3", n=2)))
        await asyncio.sleep(0.05)
        gate.set()
        for refused in submissions[2:]:
            with pytest.raises(QueueFull):
                await refused
        streams = [await accepted for accepted in submissions[:2]]
        for stream in streams:
            assert len(text_of(await collect(stream))) == 100
        await settled(loaded)
        await engine.stop()

    asyncio.run(scene())


def test_stopping_ends_every_stream() -> None:
    async def scene() -> None:
        engine, _, gate = held(hold_at=3)
        await engine.start()
        stream = await submit(engine, max_tokens=100, n=2)
        assert engine.is_healthy
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping
        assert not engine.is_healthy
        ends = [delta.finish_reason for delta in await collect(stream) if delta.finish_reason is not None]
        assert ends == [FinishReason.ABORT] * 2
        with pytest.raises(EngineUnavailable, match="is stopped"):
            await submit(engine)

    asyncio.run(scene())


def test_cached_tokens_are_reported() -> None:
    async def scene() -> None:
        loaded = small_engine()
        engine = served(loaded)
        await engine.start()
        prompt = list(range(40))
        first = await engine.submit(prompt, SamplingParams(max_tokens=1), request_id="a")
        await collect(first)
        second = await engine.submit(prompt, SamplingParams(max_tokens=1), request_id="b")
        await collect(second)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
        await engine.stop()

    asyncio.run(scene())
