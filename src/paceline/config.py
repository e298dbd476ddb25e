"""Settings: one frozen dataclass, and the only place where the environment is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.errors import ConfigError

DEFAULT_BLOCK_SIZE = 32
DEFAULT_MODEL = "smollm2-135m-instruct"
"""The alias of the model that runs when none is named; ``checkpoint/fetch.py`` knows where it comes from."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that shapes an engine. The names are those of the command line, with dashes there.

    Attributes:
        model: folder with safetensors, ``.gguf`` file, alias or Hugging Face name.
        tokenizer: folder or file to take the tokenizer from, if not from the model.
        chat_template: Jinja file that replaces the model's own template.
        ops: which implementation of the operations runs the model: "auto" or one of ``paceline.ops``.
        max_model_len: tokens of prompt and output together; None takes the model's own limit, lowered if memory asks.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens computed in one step, at most.
        block_size: tokens of one block of the key-value store.
        kv_cache_memory: bytes for keys and values; None takes a share of the memory that is really available.
        memory_utilization: that share, of what is left after the weights are loaded.
        num_kv_blocks: the number of blocks itself, overriding both.
        enable_prefix_caching: let requests share the blocks of equal prefixes.
        decode_blocks_ahead: blocks given to a running request beyond its next token.
        max_waiting: requests that may wait; more are refused. None is no limit.
        queue_timeout: seconds a request may wait before it is refused; None is no limit.
        admission_age_limit: times that a waiting request may be passed over because it does not fit yet.
        max_logprobs: largest ``logprobs`` a request may ask for; -1 is the whole vocabulary.
        num_threads: threads of the kernels; None takes the cores this process may really use.
        seed: makes the seeds reproducible that are drawn for requests without one; None draws from the system.
    """

    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    ops: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_memory: int | None = None
    memory_utilization: float = 0.5
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    decode_blocks_ahead: int = 0
    max_waiting: int | None = None
    queue_timeout: float | None = None
    admission_age_limit: int = 64
    max_logprobs: int = 20
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("block_size", self.block_size, 1)
        _at_least("kv_cache_memory", self.kv_cache_memory, 1)
        _at_least("num_kv_blocks", self.num_kv_blocks, 1)
        _at_least("decode_blocks_ahead", self.decode_blocks_ahead, 0)
        _at_least("max_waiting", self.max_waiting, 0)
        _at_least("admission_age_limit", self.admission_age_limit, 0)
        _at_least("max_logprobs", self.max_logprobs, -1)
        _at_least("num_threads", self.num_threads, 1)
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization must be above 0 and at most 1, not {self.memory_utilization}")
        if self.queue_timeout is not None and not self.queue_timeout > 0:
            raise ConfigError(f"queue_timeout must be above 0 seconds, not {self.queue_timeout}")


@dataclass(frozen=True, slots=True)
class Environment:
    """What Paceline reads from the environment; a flag of the same name wins.

    Attributes:
        cache: PACELINE_CACHE, folder for fetched models; default ``$XDG_CACHE_HOME/paceline`` or ``~/.cache/paceline``.
        api_key: PACELINE_API_KEY, the server's keys, separated by commas.
        offline: HF_HUB_OFFLINE, never touch the network.
        num_threads: OMP_NUM_THREADS, the number of kernel threads if no flag gives one.
        isa: PACELINE_ISA, the instruction set of the native kernels; default the widest that the machine runs.
    """

    cache: Path
    api_key: str | None
    offline: bool
    num_threads: int | None
    isa: str | None


def read_environment() -> Environment:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Environment(
        cache=Path(os.environ.get("PACELINE_CACHE") or Path(home) / "paceline"),
        api_key=os.environ.get("PACELINE_API_KEY"),
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


def config_field_names() -> tuple[str, ...]:
    return tuple(f.name for f in fields(EngineConfig))


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")
