"""Engines behind one interface, each in a process of its own, for benchmarks that compare them."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, cast

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.load import load_engine
from paceline.types import TokenEvent


@dataclass(frozen=True)
class Run:
    """Seconds from the submission of some requests to the last answer's end, and to each first token, on average."""

    seconds: float
    first_token: float


class Contestant(Protocol):
    """Answers prompts greedily with so many tokens each, all at once."""

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        """``shared``: prompts of this run may use what they have in common. Nothing is known from earlier runs."""


class Paceline:
    """Paceline in this process, with the settings of :class:`~paceline.config.EngineConfig`."""

    def __init__(self, model: str, **settings: Any) -> None:
        loaded = load_engine(EngineConfig(model, **settings))
        self._watch = _FirstTokens(loaded.engine)
        self._llm = LLM.from_engine(replace(loaded, engine=cast(Engine, self._watch)))
        self.numerics = self._llm.numerics

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        del shared  # it finds by itself what is shared, at no cost
        self._llm.reset_prefix_cache()
        self._watch.times.clear()
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=length) for length in lengths]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(lengths)
        return Run(seconds, sum(time - begin for time in self._watch.times.values()) / len(prompts))


class _FirstTokens:
    """An engine that notes when each sequence's first token was there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.times: dict[str, float] = {}

    def step(self) -> list[TokenEvent]:
        events = self._engine.step()
        now = time.perf_counter()
        for event in events:
            if event.token_ids:
                self.times.setdefault(event.request_id, now)
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class LlamaCpp:
    """llama.cpp's server, from the ``xllamacpp`` package, over HTTP.

    Args:
        slots: requests that run at once.
        context: tokens of one request at most.
    """

    def __init__(self, model: str, *, threads: int, slots: int, context: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel = slots
        params.n_ctx = slots * context
        params.verbosity = 0
        params.cache_ram_mib = 0  # copies of finished prompts, which nothing here asks for again
        self._server = xllamacpp.Server(params)
        self._url = f"{self._server.listening_address}/completion"

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        begin = time.perf_counter()

        def answer(prompt: list[int], length: int) -> float:
            """Seconds from the beginning of the run to the first token of this request."""
            body = {"prompt": prompt, "n_predict": length, "ignore_eos": True, "cache_prompt": shared}
            # Greedy with the least work: the likeliest token, and no other sampler.
            body |= {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
            request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:
                done = json.load(response)
            assert done["tokens_predicted"] == length
            after: float = done["timings"]["predicted_ms"] / 1000
            return time.perf_counter() - begin - after

        with ThreadPoolExecutor(len(prompts)) as pool:
            first_tokens = list(pool.map(answer, prompts, lengths))
        return Run(time.perf_counter() - begin, sum(first_tokens) / len(prompts))


class InChild:
    """A contestant in a child process, which sleeps between its runs. ``make`` must be picklable.

    Attributes:
        peak_memory: bytes, the most that the process has had in memory up to the end of its latest run.
    """

    def __init__(self, make: Callable[[], Contestant]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, there), daemon=True)
        self._process.start()
        there.close()
        self.peak_memory: int = self._here.recv()

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        self._here.send((prompts, lengths, shared))
        run, self.peak_memory = self._here.recv()
        return cast(Run, run)

    def __enter__(self) -> InChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.close()
        self._process.join(10)
        self._process.terminate()


def _serve(make: Callable[[], Contestant], pipe: Connection) -> None:
    contestant = make()
    pipe.send(_peak_memory())
    while True:
        try:
            prompts, lengths, shared = pipe.recv()
        except EOFError:
            return
        run = contestant.run(prompts, lengths, shared=shared)
        pipe.send((run, _peak_memory()))


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
