from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.load import load_engine
from paceline.errors import ConfigError
from paceline.tensors import Encoding
from paceline.text.thinking import ThinkingTags
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


def test_logits_are_reported_where_the_settings_say_so(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.F32)
    prompt, params = random_prompt(5), SamplingParams(max_tokens=2, temperature=0.5, logprobs=-1, prompt_logprobs=-1)
    entries = {}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"):
        with LLM(str(path), logprobs_mode=mode, max_logprobs=-1, num_kv_blocks=4) as llm:
            output = llm.generate([prompt], replace(params, seed=1))[0]
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        entries[mode] = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for raw, logits in zip(entries["raw_logprobs"], entries["raw_logits"], strict=True):
        assert raw is not None
        assert logits is not None
        assert (raw.token_id, raw.rank, raw.top_ids) == (logits.token_id, logits.rank, logits.top_ids)
        assert normalised(logits.top_logprobs) == pytest.approx(raw.top_logprobs, abs=1e-4)
        assert logits.logprob - logits.top_logprobs[0] == pytest.approx(raw.logprob - raw.top_logprobs[0], abs=1e-4)
    # A prompt is not sampled: its log-probabilities are raw in every mode.
    assert entries["processed_logprobs"][:4] == entries["raw_logprobs"][:4]
    assert entries["processed_logits"][:4] == entries["raw_logits"][:4]
    for index in (4, 5):
        raw_logits, processed = entries["raw_logits"][index], entries["processed_logits"][index]
        assert raw_logits is not None
        assert processed is not None
        assert processed.top_logprobs == pytest.approx([value / 0.5 for value in raw_logits.top_logprobs], abs=1e-4)
        logprobs = entries["processed_logprobs"][index]
        assert logprobs is not None
        assert normalised(processed.top_logprobs) == pytest.approx(logprobs.top_logprobs, abs=1e-4)


def normalised(logits: Sequence[float]) -> list[float]:
    log_sum = math.log(math.fsum(map(math.exp, logits)))
    return [value - log_sum for value in logits]


def test_tags_of_the_thinking_can_be_set(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.F32)
    assert load_engine(EngineConfig(str(path), num_kv_blocks=4)).info.thinking is None
    settings = {"thinking_start": "<s>", "thinking_end": "</s>", "thinking_close": "<s></s>"}
    info = load_engine(EngineConfig(str(path), num_kv_blocks=4, **settings)).info  # type: ignore[arg-type]
    assert info.thinking == ThinkingTags((1,), (2,), (1, 2))
    assert (info.formats.think_begin, info.formats.think_end) == ((1,), (2,))  # answers are taken apart there, too
    for wrong, message in (({"thinking_close": "x"}, "must contain"), ({"thinking_start": "x"}, "cannot spell 'x'")):
        with pytest.raises(ConfigError, match=message):
            load_engine(EngineConfig(str(path), num_kv_blocks=4, **{**settings, **wrong}))  # type: ignore[arg-type]


def test_quantization_of_weights_that_are_quantised_already_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", Encoding.Q8_0)
    with pytest.raises(ConfigError, match=r"quantization int4 is for .*model\.gguf has none"):
        load_engine(EngineConfig(str(path), quantization="int4", num_kv_blocks=4))
