from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.load import load_engine
from paceline.errors import ConfigError
from paceline.tensors import Encoding
from support.tiny_gguf import write_gguf
from support.tiny_models import make_model, random_prompt


def prompt_scores(path: Path, quantization: str | None) -> tuple[str, list[float]]:
    """The numerics, and the log-probability of each prompt token after the first."""
    prompt = random_prompt(40)
    with LLM(str(path), quantization=quantization, num_kv_blocks=4) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        assert output.prompt_logprobs is not None
        return llm.numerics, [entry.logprob for entry in output.prompt_logprobs if entry is not None]


def test_quantization_at_load_stays_near_the_weights_as_stored(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.BF16)
    plain_numerics, plain = prompt_scores(path, None)
    changes = {}
    for quantization in ("int8", "int4"):
        numerics, scores = prompt_scores(path, quantization)
        assert numerics != plain_numerics
        changes[quantization] = sum(abs(a - b) for a, b in zip(scores, plain, strict=True)) / len(plain)
    assert 0 < changes["int8"] < 0.1
    assert changes["int8"] < changes["int4"] < 1.0


def test_quantization_of_weights_that_are_quantised_already_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.Q8_0)
    with pytest.raises(ConfigError, match=r"quantization int4 is for .*model\.gguf has none"):
        load_engine(EngineConfig(str(path), quantization="int4", num_kv_blocks=4))
