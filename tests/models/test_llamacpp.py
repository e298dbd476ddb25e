"""Tiny GGUF files of every architecture give what llama.cpp gives: the conventions of the format are its own."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import xllamacpp

from paceline.checkpoint.open import open_checkpoint
from paceline.models.weights import load_model
from paceline.ops.reference import ReferenceOps
from support.run_model import model_logits
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, random_prompt

NUM_TOKENS = 8
EOS = 2
ERROR = {"gemma3": 3e-3}
"""Of a log-probability, 1e-4 if not given here: llama.cpp takes its GELU from a table in float16."""


@pytest.mark.parametrize(
    "name", ["llama", "llama-llama3-rope", "llama-linear-rope", "qwen2", "qwen3", "ernie", "gemma3"]
)
def test_logprobs_are_those_of_llamacpp(name: str, tmp_path: Path) -> None:
    path = write_gguf(make_model(name), tmp_path / "model.gguf")
    prompt = random_prompt(40)
    tokens, top = llamacpp_greedy(path, prompt)
    model = load_model(open_checkpoint(path), ReferenceOps(), max_positions=64)
    logits = model_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    not_ending = np.where(np.arange(logits.shape[1]) == EOS, -np.inf, logits)
    assert tokens == not_ending.argmax(axis=1).tolist()
    for row, likeliest in zip(logprobs, top, strict=True):
        assert len(likeliest) == 10
        for token, logprob in likeliest.items():
            assert abs(row[token] - logprob) < ERROR.get(name, 1e-4)


def llamacpp_greedy(path: Path, prompt: list[int]) -> tuple[list[int], list[dict[int, float]]]:
    """llama.cpp's answer, and the log-probabilities of its ten likeliest tokens at each step."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.n_ctx = 256
    params.n_parallel = 1
    params.verbosity = 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "n_probs": 10, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    steps = answer["completion_probabilities"]
    assert len(steps) == NUM_TOKENS
    return [step["id"] for step in steps], [{t["id"]: t["logprob"] for t in step["top_logprobs"]} for step in steps]
