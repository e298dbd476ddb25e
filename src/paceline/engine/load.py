"""From settings to a running engine: open, pack, size, wire together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.fetch import resolve_model
from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.config import EngineConfig, read_environment
from paceline.core.kv_manager import KvManager
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.engine.engine import Engine
from paceline.engine.messages import EngineFacts
from paceline.engine.model_info import ModelInfo
from paceline.errors import CheckpointError, ConfigError, RequestError
from paceline.models.decoder import Adapter
from paceline.models.lora import load_adapter
from paceline.models.registry import read_spec
from paceline.models.spec import ModelSpec
from paceline.models.weights import has_dense_matrices, load_model
from paceline.ops.api import Ops
from paceline.ops.select import make_ops
from paceline.runner.memory import gib, resident_memory
from paceline.runner.profile import size_kv
from paceline.runner.runner import ModelRunner
from paceline.sample.grammar import Grammars, Vocabulary
from paceline.sampling_params import SamplingParams
from paceline.text.answer_formats import NONE, ReasoningFormat, answer_formats, reasoning_format, tool_format
from paceline.text.thinking import ThinkingTags, find_thinking_tags
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from paceline.types import LogprobsMode

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

GENERATION_CONFIG_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's files, opened: nothing of the weights has been read yet."""

    path: Path
    checkpoint: Checkpoint
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Runtime:
    """What computes: scheduler and runner around the weights, and what they know of themselves."""

    engine: Engine
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """Both halves of a model, in one process."""

    engine: Engine
    info: ModelInfo

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(self.info.max_model_len, self.engine.scheduler.kv.num_blocks, self.info.numerics)


def load_engine(config: EngineConfig, *, progress: bool = True) -> LoadedEngine:
    """Fetch the model if needed, load it, and build the engine around it.

    Raises CheckpointError for files that cannot be used and ConfigError for settings that do not fit.
    """
    opened = open_model(config, progress=progress)
    # Packing is native code, which leaves the interpreter to the text side.
    with ThreadPoolExecutor(1) as executor:
        text = executor.submit(load_text, opened, config)
        grammars = Grammars(lambda: grammar_vocabulary(text.result()[0]))
        runtime = build_runtime(config, opened, lambda: text.result()[0], grammars)
        tokenizer, template = text.result()
    return LoadedEngine(runtime.engine, describe_model(config, opened, tokenizer, template, grammars, runtime.facts))


def load_runtime(config: EngineConfig) -> Runtime:
    """The half of :func:`load_engine` that computes, for a process of its own. Same errors."""
    opened = open_model(config, progress=False)
    with ThreadPoolExecutor(1) as executor:
        tokenizer = executor.submit(_load_tokenizer, opened, config)
        grammars = Grammars(lambda: grammar_vocabulary(tokenizer.result()))
        return build_runtime(config, opened, tokenizer.result, grammars)


def open_model(config: EngineConfig, *, progress: bool = True) -> OpenModel:
    """Fetch the files if needed, and open them. Raises CheckpointError."""
    environment = read_environment()
    path = resolve_model(config.model, cache=environment.cache, offline=environment.offline, progress=progress)
    checkpoint = open_checkpoint(path)
    return OpenModel(path, checkpoint, read_spec(checkpoint))


def load_text(opened: OpenModel, config: EngineConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """The half that turns texts into tokens and back."""
    from paceline.text.chat_template import load_chat_template  # Jinja's import is best done beside the packing, too

    tokenizer = _load_tokenizer(opened, config)
    override = None if config.chat_template is None else Path(config.chat_template)
    return tokenizer, load_chat_template(opened.checkpoint, tokenizer, override)


def build_runtime(
    config: EngineConfig, opened: OpenModel, tokenizer_of: Callable[[], Tokenizer], grammars: Grammars
) -> Runtime:
    """Pack the weights, size the store, wire scheduler and runner. ``tokenizer_of`` is called after the packing."""
    environment = read_environment()
    begin = time.perf_counter()
    checkpoint, spec = opened.checkpoint, opened.spec
    threads = config.num_threads or environment.num_threads
    ops = make_ops(config.ops, threads, environment.isa, config.quantization)
    if config.quantization is not None and not has_dense_matrices(checkpoint):
        raise ConfigError(
            f"quantization {config.quantization} is for matrices stored in 32 or 16 bits, and {opened.path} has none: "
            "they are quantised already"
        )
    max_positions = config.max_model_len or spec.max_position_embeddings
    # Before the model, which takes longer: what is wrong with an adapter is told at once.
    adapters = _load_adapters(config.lora or {}, checkpoint, ops)
    model = load_model(checkpoint, ops, max_positions=min(max_positions, spec.max_position_embeddings))
    model = replace(model, adapters=adapters)
    tokenizer = tokenizer_of()
    if tokenizer.vocab_size > spec.vocab_size:
        raise CheckpointError(
            f"{opened.path}: the tokenizer has {tokenizer.vocab_size} tokens, more than the model's {spec.vocab_size}"
        )
    packed = time.perf_counter()
    kv_size = size_kv(config, model, ops, tokenizer.vocab_size)
    runner = ModelRunner(
        model,
        ops,
        ops.make_kv(model.kv_layout, kv_size.num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_model_len=kv_size.max_model_len,
        vocab_size=tokenizer.vocab_size,
        grammars=grammars,
    )
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=kv_size.max_model_len,
        queue_timeout=config.queue_timeout,
        admission_age_limit=config.admission_age_limit,
        decode_blocks_ahead=config.decode_blocks_ahead,
        target_step_ms=config.target_step_ms,
        pair_cost=spec.pair_cost,
    )
    manager = KvManager(kv_size.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching)
    logger.info(
        "%s: packed in %.2f s, sized in %.2f s; %s in memory; numerics %s",
        config.model, packed - begin, time.perf_counter() - packed, gib(resident_memory()), ops.numerics,
    )  # fmt: skip
    facts = EngineFacts(kv_size.max_model_len, kv_size.num_blocks, ops.numerics)
    return Runtime(Engine(Scheduler(limits, manager), runner), facts)


def describe_model(
    config: EngineConfig,
    opened: OpenModel,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    grammars: Grammars,
    facts: EngineFacts,
) -> ModelInfo:
    """What the front knows of the model. Raises ConfigError for settings of its formats that do not fit."""
    sources = "" if template is None else template.sources
    return ModelInfo(
        name=config.model,
        tokenizer=tokenizer,
        chat_template=template,
        thinking=_thinking_tags(config, tokenizer, template),
        eos_token_ids=tuple(sorted({*tokenizer.eos_ids, *opened.spec.eos_token_ids})),
        max_model_len=facts.max_model_len,
        max_logprobs=config.max_logprobs,
        logprobs_mode=LogprobsMode(config.logprobs_mode),
        max_cached_tokens=facts.num_blocks * config.block_size,
        default_params=_generation_defaults(opened.checkpoint.generation_config),
        formats=answer_formats(
            _reasoning_format(config, sources), tool_format(config.tool_call_parser, sources), tokenizer
        ),
        grammars=grammars,
        numerics=facts.numerics,
        adapters=dict(config.lora or {}),
    )


def grammar_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokens as grammars see them."""
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, tokenizer.special_ids, tokenizer.plain_encoder())


def _load_tokenizer(opened: OpenModel, config: EngineConfig) -> Tokenizer:
    return load_tokenizer(opened.checkpoint, None if config.tokenizer is None else Path(config.tokenizer))


def _load_adapters(folders: Mapping[str, str], checkpoint: Checkpoint, ops: Ops) -> dict[str, Adapter]:
    adapters = {}
    for name, folder in folders.items():
        adapters[name] = load_adapter(Path(folder), checkpoint, ops)
        logger.info("adapter %s: %s, from %s", name, gib(adapters[name].nbytes), folder)
    return adapters


def _thinking_tags(config: EngineConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> ThinkingTags | None:
    return find_thinking_tags(
        tokenizer,
        "" if template is None else template.sources,
        start=config.thinking_start,
        end=config.thinking_end,
        close=config.thinking_close,
    )


def _reasoning_format(config: EngineConfig, template: str) -> ReasoningFormat | None:
    """Tags that are given are also those at which answers are taken apart."""
    found = reasoning_format(config.reasoning_parser, template)
    if config.reasoning_parser.lower() == NONE or config.thinking_start is None or config.thinking_end is None:
        return found
    begin, end = config.thinking_start, config.thinking_end
    return ReasoningFormat("given", begin, end) if found is None else replace(found, begin=begin, end=end)


def _generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampling defaults that a model's makers recommend; values we would refuse from a caller are left out."""
    defaults: dict[str, float | int] = {}
    for name in GENERATION_CONFIG_PARAMS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            logger.warning("generation_config.json: %s; ignored", error)
            continue
        defaults[name] = value
    return defaults
