"""llama.cpp as an oracle, in this process and over HTTP."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import xllamacpp


class LlamaCpp:
    """A llama.cpp server on one thread, stopped when the object goes."""

    def __init__(self, model: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        params.warmup = False
        params.n_ctx = 64
        params.n_parallel = 1
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
            return tokens
