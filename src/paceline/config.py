"""Settings: one frozen dataclass, and the only place where the environment is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_origin, get_type_hints

from paceline.errors import ConfigError

DEFAULT_BLOCK_SIZE = 32
LIMITS: dict[str, tuple[float, float]] = {
    "max_model_len": (1, 2**31 - 1),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "target_step_ms": (1.0, 1e9),
    "block_size": (1, 2**12),
    "kv_cache_memory": (1, 2**50),
    "memory_utilization": (0.001, 1.0),
    "num_kv_blocks": (1, 2**31 - 1),
    "decode_blocks_ahead": (0, 2**12),
    "max_waiting": (0, 2**31 - 1),
    "queue_timeout": (0.001, 1e9),
    "engine_timeout": (1.0, 1e9),
    "admission_age_limit": (0, 2**31 - 1),
    "max_logprobs": (-1, 2**31 - 1),
    "num_threads": (1, 1024),
}
"""Smallest and largest value of each numeric setting."""
CHOICES: dict[str, tuple[str, ...]] = {
    "logprobs_mode": ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
}
"""The values of each setting that has a few."""
DEFAULT_MODEL = "smollm2-135m-instruct"
"""The alias of the model that runs when none is named; ``checkpoint/aliases.py`` knows where it comes from."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that shapes an engine. The names are those of the command line, with dashes there.

    Attributes:
        model: folder with safetensors, ``.gguf`` file, alias or Hugging Face name.
        tokenizer: folder or file to take the tokenizer from, if not from the model.
        chat_template: Jinja file that replaces the model's own template.
        reasoning_parser: how the model writes its thinking: the name of a format, "none", or "auto", which reads it
            from the chat template.
        tool_call_parser: likewise its tool calls.
        thinking_start: text that opens the model's thinking; None finds it in tokenizer and chat template.
        thinking_end: text that ends it.
        thinking_close: text that ends a thinking whose budget is used up; must contain thinking_end.
        ops: which implementation of the operations runs the model: "auto" or one of ``paceline.ops``.
        quantization: "int8" or "int4" packs matrices that are stored in 32 or 16 bits in that form, in groups of 32
            weights (the output head never below int8); None keeps each matrix as it is stored.
        lora: folders of LoRA adapters by the names under which requests ask for them; on the command line NAME=PATH,
            once for each.
        max_model_len: tokens of prompt and output together; None takes the model's own limit, lowered if memory asks.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step, at most.
        target_step_ms: how long a step may take for which running streams wait, in milliseconds: prompts are cut into
            smaller pieces then, of 32 tokens or what costs as much at the least. None is no limit.
        block_size: tokens of one block of the key-value store.
        kv_cache_memory: bytes for keys and values; None takes a share of the memory that is really available.
        memory_utilization: that share, of what is left after the weights are loaded.
        num_kv_blocks: the number of blocks itself, overriding both.
        enable_prefix_caching: let requests share the blocks of equal prefixes.
        decode_blocks_ahead: blocks given to a running request beyond its next token.
        max_waiting: sequences that may wait for a slot in a server; more are refused. None is no limit.
        queue_timeout: seconds a request may wait before it is refused; None is no limit.
        engine_timeout: seconds without a sign of life after which the engine process of a server is replaced; a step
            that takes longer is taken for one that hangs.
        admission_age_limit: times that a waiting request may be passed over because it does not fit yet.
        max_logprobs: largest ``logprobs`` a request may ask for; -1 is the whole vocabulary.
        logprobs_mode: "raw_logprobs" are those of the logits as the model gave them, "processed_logprobs" those that
            tokens are chosen from, after all edits and the temperature; "raw_logits" and "processed_logits" report
            logits in their place.
        num_threads: threads of the kernels; None takes the cores this process may really use.
        seed: makes the seeds reproducible that are drawn for requests without one; None draws from the system.
    """

    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    thinking_start: str | None = None
    thinking_end: str | None = None
    thinking_close: str | None = None
    ops: str = "auto"
    quantization: str | None = None
    lora: Mapping[str, str] | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    target_step_ms: float | None = 200.0
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_memory: int | None = None
    memory_utilization: float = 0.5
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    decode_blocks_ahead: int = 0
    max_waiting: int | None = 1024
    queue_timeout: float | None = None
    engine_timeout: float = 120.0
    admission_age_limit: int = 64
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        types = get_type_hints(EngineConfig)
        for field in fields(self):
            value = getattr(self, field.name)
            options = getattr(types[field.name], "__args__", (types[field.name],))
            options = tuple(get_origin(option) or option for option in options)
            # A bool is an int to Python, but True is no number of anything.
            kinds = (*options, int) if float in options and not isinstance(value, bool) else options
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in options):
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in options)
                raise ConfigError(f"{field.name} must be {wanted}, not {value!r:.60}")
            low, high = LIMITS.get(field.name, (None, None))
            if value is not None and low is not None and high is not None and not low <= value <= high:
                raise ConfigError(f"{field.name} must be from {low} to {high}, not {value}")
            if field.name in CHOICES and value not in CHOICES[field.name]:
                raise ConfigError(f"{field.name} must be one of {', '.join(CHOICES[field.name])}, not {value!r:.60}")
        for name, folder in (self.lora or {}).items():
            if not (isinstance(name, str) and name and isinstance(folder, str) and folder):
                raise ConfigError(f"lora must give folders by adapters' names, not {folder!r:.60} for {name!r:.60}")


@dataclass(frozen=True, slots=True)
class Environment:
    """What Paceline reads from the environment; a flag of the same name wins.

    Attributes:
        cache: PACELINE_CACHE, folder for fetched models; default ``$XDG_CACHE_HOME/paceline`` or ``~/.cache/paceline``.
        api_key: PACELINE_API_KEY, the server's keys, separated by commas.
        admin_api_key: PACELINE_ADMIN_API_KEY, likewise its administrator's.
        offline: HF_HUB_OFFLINE, never touch the network.
        num_threads: OMP_NUM_THREADS, the number of kernel threads if no flag gives one.
        isa: PACELINE_ISA, the instruction set of the native kernels; default the widest that the machine runs.
    """

    cache: Path
    api_key: str | None
    admin_api_key: str | None
    offline: bool
    num_threads: int | None
    isa: str | None


def read_environment() -> Environment:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Environment(
        cache=Path(os.environ.get("PACELINE_CACHE") or Path(home) / "paceline"),
        api_key=os.environ.get("PACELINE_API_KEY"),
        admin_api_key=os.environ.get("PACELINE_ADMIN_API_KEY"),
        offline=parse_bool(os.environ.get("HF_HUB_OFFLINE", "0")),
        num_threads=int(threads) if threads.isdigit() and int(threads) > 0 else None,
        isa=os.environ.get("PACELINE_ISA") or None,
    )


def parse_bool(text: str) -> bool:
    """1/0, true/false, on/off, yes/no, in any case; the empty text is false. Raises ConfigError for anything else."""
    word = text.strip().lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("", "0", "false", "off", "no"):
        return False
    raise ConfigError(f"expected a boolean (1/0, true/false, on/off), not {text!r}")
