"""Sizing the key-value store: what is left of the memory after the weights and the largest step."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import dataclass, replace

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.decoder import Model
from paceline.ops.api import Ops
from paceline.runner.memory import available_memory, gib
from paceline.runner.runner import ModelRunner
from paceline.types import SeqSpan, SeqStart, StepPlan, TokenRules

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class KvSize:
    """The outcome: blocks of the store, and the context that one request may have."""

    num_blocks: int
    max_model_len: int


def size_kv(config: EngineConfig, model: Model, ops: Ops, vocab_size: int) -> KvSize:
    """Decide the number of blocks and the context length.

    The memory is ``kv_cache_memory``, or ``memory_utilization`` of what is available once the largest step has its
    share. More blocks than ``max_num_seqs`` full contexts are never taken. Raises ConfigError, with the arithmetic, if
    one request of the wanted context cannot fit; a context that nobody asked for is lowered instead.
    """
    wanted = config.max_model_len or model.spec.max_position_embeddings
    if wanted > model.spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's own limit of {model.spec.max_position_embeddings} tokens"
        )
    size = config.block_size
    block_bytes = ops.kv_block_bytes(model.kv_layout, size)
    blocks_per_seq = -(-wanted // size)
    if config.num_kv_blocks is not None:
        fitting, source = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_memory is not None:
        fitting, source = config.kv_cache_memory // block_bytes, f"kv_cache_memory of {gib(config.kv_cache_memory)}"
    else:
        step_bytes = measure_largest_step(config, model, ops, vocab_size)
        rest = max(0, available_memory() - step_bytes)
        fitting = int(rest * config.memory_utilization) // block_bytes
        source = f"{config.memory_utilization:.0%} of {gib(rest)} left after the largest step"
        logger.info("the largest step (%d tokens) takes %s", config.max_num_batched_tokens, gib(step_bytes))
    blocks = min(fitting, blocks_per_seq * config.max_num_seqs)
    free = available_memory()
    if blocks * block_bytes > free:
        raise ConfigError(
            f"{blocks} blocks of {size} tokens take {gib(blocks * block_bytes)} ({source}), "
            f"but only {gib(free)} of memory are available"
        )
    context = min(wanted, blocks * size)
    if context < wanted and (config.max_model_len is not None or context == 0):
        raise ConfigError(
            f"one request of {wanted} tokens needs {blocks_per_seq} blocks of {size} tokens "
            f"({gib(blocks_per_seq * block_bytes)}), but there are {fitting} ({source}): "
            f"give more memory" + (f", or lower max_model_len to {fitting * size}" if fitting else "")
        )
    if context < wanted:
        logger.warning("context lowered from %d to %d tokens: that is what the memory holds", wanted, context)
    logger.info(
        "keys and values: %d blocks of %d tokens, %s (%s); context %d, %.1f requests of full context at once",
        blocks, size, gib(blocks * block_bytes), source, context, blocks * size / context,
    )  # fmt: skip
    return KvSize(blocks, context)


def measure_largest_step(config: EngineConfig, model: Model, ops: Ops, vocab_size: int) -> int:
    """Bytes that the largest step takes beyond weights and store.

    Every array of a step has one row for each token or for each choice, so two small trial steps, run as ordinary
    plans, tell what a row of either kind costs: the largest step itself would only make the start slower.
    """
    tokens = min(TRIAL_TOKENS, config.max_model_len or TRIAL_TOKENS, model.spec.max_position_embeddings)
    one_choice = _trial_bytes([tokens], config, model, ops, vocab_size)
    all_choose = _trial_bytes([1] * tokens, config, model, ops, vocab_size)
    per_choice = max(0, all_choose - one_choice) / max(1, tokens - 1)
    per_token = max(0.0, one_choice - per_choice) / tokens
    return int(per_token * config.max_num_batched_tokens + per_choice * config.max_num_seqs)


def _trial_bytes(lengths: list[int], config: EngineConfig, model: Model, ops: Ops, vocab_size: int) -> int:
    """The peak of the arrays that a step of sequences of these lengths allocates."""
    starts, spans, used = [], [], 0
    for slot, length in enumerate(lengths):
        blocks = tuple(range(used, used + -(-length // config.block_size)))
        used += len(blocks)
        starts.append(SeqStart(slot, (0,) * length, length, 0, blocks, TokenRules(temperature=1.0)))
        spans.append(SeqSpan(slot, 0, length))
    plans = [StepPlan(0, start=tuple(starts), spans=tuple(spans))]
    if model.adapters:
        # Rows with adapters may take other memory, and what the first step keeps stays beside it.
        largest = max(model.adapters, key=lambda name: model.adapters[name].nbytes)
        adapted = tuple(replace(start, adapter=largest) for start in starts)
        plans.append(StepPlan(1, tuple(range(len(lengths))), adapted, tuple(spans)))
    kv = ops.make_kv(model.kv_layout, used, config.block_size)
    runner = ModelRunner(
        model, ops, kv, max_num_seqs=len(lengths), max_model_len=max(lengths) + 1, vocab_size=vocab_size
    )
    tracemalloc.start()
    try:
        results = [seq for plan in plans for seq in runner.execute(plan).seqs]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for seq in results:
        if seq.error is not None:
            raise ConfigError(f"the model failed in its trial step: {seq.error}")
    return peak
