"""Engines behind one interface, each in a process of its own, for benchmarks that compare them."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.load import load_engine
from paceline.runner.memory import peak_memory
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
    """llama.cpp's server in a process of its own, over HTTP.

    Args:
        server: the executable, ``llama-server``.
        slots: requests that run at once.
        context: tokens of one request at most.
    """

    def __init__(self, server: Path, model: Path, *, threads: int, slots: int, context: int) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        # No copies of finished prompts, which nothing here asks for again.
        command = [server, "--model", model, "--port", port, "--parallel", slots, "--ctx-size", slots * context]
        command += ["--threads", threads, "--threads-batch", threads, "--cache-ram", 0, "--log-disable"]
        self._process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> LlamaCpp:
        try:
            while not self._is_ready():
                if self._process.poll() is not None:
                    raise SystemExit(f"llama-server ended with {self._process.returncode}")
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health"):
                return True
        except OSError:  # not listening, or still loading
            return False

    @property
    def peak_memory(self) -> int:
        return peak_memory(self._process.pid)

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        begin = time.perf_counter()

        def answer(prompt: list[int], length: int) -> float:
            """Seconds from the beginning of the run to the first token of this request."""
            body = {"prompt": prompt, "n_predict": length, "ignore_eos": True, "cache_prompt": shared}
            # Greedy with the least work: the likeliest token, and no other sampler.
            body |= {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{self._url}/completion", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:
                done = json.load(response)
            assert done["tokens_predicted"] == length
            after: float = done["timings"]["predicted_ms"] / 1000
            return time.perf_counter() - begin - after

        with ThreadPoolExecutor(len(prompts)) as pool:
            first_tokens = list(pool.map(answer, prompts, lengths))
        return Run(time.perf_counter() - begin, sum(first_tokens) / len(prompts))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class InChild:
    """A contestant in a child process, which sleeps between its runs. ``make`` must be picklable."""

    def __init__(self, make: Callable[[], Contestant]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, there), daemon=True)
        self._process.start()
        there.close()
        self._here.recv()

    def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], *, shared: bool = False) -> Run:
        self._here.send((prompts, lengths, shared))
        return cast(Run, self._here.recv())

    @property
    def peak_memory(self) -> int:
        assert self._process.pid is not None
        return peak_memory(self._process.pid)

    def __enter__(self) -> InChild:
        return self

    def __exit__(self, *error: object) -> None:
        self._here.close()
        self._process.join(10)
        self._process.terminate()


def _serve(make: Callable[[], Contestant], pipe: Connection) -> None:
    contestant = make()
    pipe.send("ready")
    while True:
        try:
            prompts, lengths, shared = pipe.recv()
        except EOFError:
            return
        pipe.send(contestant.run(prompts, lengths, shared=shared))
