from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps
from paceline.runner.profile import KvSize, measure_largest_step, size_kv
from support.random_model import CONTEXT, VOCAB_SIZE, random_adapters, random_model

# Two layers of two key-value heads of 32 elements, float32, keys and values: 2 * 2 * 2 * 32 * 4 bytes a token.
TOKEN_BYTES = 1024


def sized(**settings: object) -> KvSize:
    ops = ReferenceOps()
    config = EngineConfig("random", **{"block_size": 16, "max_num_seqs": 4, **settings})  # type: ignore[arg-type]
    return size_kv(config, random_model(ops), ops, VOCAB_SIZE)


def test_a_given_memory_is_divided_into_blocks() -> None:
    assert sized(kv_cache_memory=10 * 16 * TOKEN_BYTES + 5) == KvSize(10, CONTEXT)


def test_more_than_all_requests_can_use_is_never_taken() -> None:
    assert sized(kv_cache_memory=2**30) == KvSize(4 * CONTEXT // 16, CONTEXT)


def test_the_default_takes_what_is_available() -> None:
    assert sized() == KvSize(4 * CONTEXT // 16, CONTEXT)


def test_a_context_nobody_asked_for_is_lowered_to_what_fits() -> None:
    assert sized(num_kv_blocks=3) == KvSize(3, 48)


def test_a_wanted_context_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"one request of 100 tokens needs 7 blocks of 16 tokens .* there are 3"):
        sized(num_kv_blocks=3, max_model_len=100)


def test_memory_for_not_even_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 0"):
        sized(kv_cache_memory=100)


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"exceeds the model's own limit of {CONTEXT}"):
        sized(max_model_len=CONTEXT + 1)


def test_the_largest_step_counts_what_adapters_take() -> None:
    """Called one by one, the operations do not work in the memory that a captured pass keeps: there are both."""
    ops = CpuOps(1)
    config, model = EngineConfig("random", max_num_batched_tokens=512), random_model(ops)
    plain = measure_largest_step(config, model, ops, VOCAB_SIZE)
    adapted = measure_largest_step(config, replace(model, adapters=random_adapters(ops)), ops, VOCAB_SIZE)
    assert adapted > plain + 512 * 96 * 4


def test_the_largest_step_grows_with_the_token_budget_and_the_choices() -> None:
    ops = ReferenceOps()
    model = random_model(ops)

    def step_bytes(tokens: int, seqs: int) -> int:
        return measure_largest_step(
            EngineConfig("random", max_num_batched_tokens=tokens, max_num_seqs=seqs), model, ops, VOCAB_SIZE
        )

    assert step_bytes(512, 1) > step_bytes(64, 1) > 64 * 64 * 4
    assert step_bytes(64, 64) > step_bytes(64, 1)
