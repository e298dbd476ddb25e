"""What ``adapter_config.json`` says of a LoRA adapter (arXiv:2106.09685), as the ``peft`` library means it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import CheckpointError
from paceline.models.fields import Fields

ALL_LINEAR = "all-linear"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": ([],),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "use_bdlora": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "velora_config": (),
    "megatron_config": (),
}
"""Settings that change what an adapter computes, with the values that ask for nothing; null is always one of them."""
UNCHANGED_BASE = (True, False, "gaussian", "eva", "mica", "orthogonal")
"""Values of ``init_lora_weights`` with which training has left the model's own weights as they were."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Which linear layers an adapter changes, and how.

    Attributes:
        source: the file, for messages.
        rank, alpha: those of layers that no pattern names.
        rank_patterns, alpha_patterns: regular expressions of the ends of names, the first that matches counts.
        root_scaling: the factor is alpha / sqrt(rank) and not alpha / rank (arXiv:2312.03732).
        targets, excluded: a regular expression of whole names, or the ends of names.
        layers: numbers of the layers that are changed; None is all.
    """

    source: str
    rank: int
    alpha: float
    rank_patterns: tuple[tuple[re.Pattern[str], int], ...]
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...]
    root_scaling: bool
    targets: re.Pattern[str] | tuple[str, ...]
    excluded: re.Pattern[str] | tuple[str, ...]
    layers: frozenset[int] | None

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.rank_patterns if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((alpha for pattern, alpha in self.alpha_patterns if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_scaling else rank)

    def changed(self, modules: Mapping[str, int]) -> list[str]:
        """Those of ``modules``, names with the numbers of their layers, that the adapter changes.

        Raises CheckpointError for a target that is none of them.
        """
        if isinstance(self.targets, tuple):
            for target in self.targets:
                if not any(_is_named(module, (target,)) for module in modules):
                    raise CheckpointError(
                        f"{self.source}: target_modules names {target!r:.100}, which an adapter cannot change here; "
                        f"those that it can: {', '.join(_last_words(modules))}"
                    )
        return [
            module
            for module, layer in modules.items()
            if _is_named(module, self.targets)
            and not _is_named(module, self.excluded)
            and (self.layers is None or layer in self.layers)
        ]


def read_lora_config(source: str, config: Mapping[str, Any]) -> LoraConfig:
    """Raises CheckpointError, naming the key, for values that are absent, absurd or not supported."""
    fields = Fields(source, config)
    for key, neutral in NEUTRAL.items():
        value = fields.get(key)
        if value is not None and value not in neutral:
            wanted = f"; only {neutral[0]!r} is" if neutral else ""
            raise fields.error(key, f"{value!r:.100} is not supported{wanted}")
    initial = fields.get("init_lora_weights")
    if initial is not None and (initial.lower() if isinstance(initial, str) else initial) not in UNCHANGED_BASE:
        raise fields.error(
            "init_lora_weights", f"{initial!r:.100} is not supported: it changes the model's own weights, too"
        )
    ranks, alphas = fields.section("rank_pattern"), fields.section("alpha_pattern")
    return LoraConfig(
        source=source,
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        rank_patterns=tuple((_pattern(ranks, name), ranks.integer(name)) for name in ranks.names),
        alpha_patterns=tuple((_pattern(alphas, name), alphas.number(name)) for name in alphas.names),
        root_scaling=fields.flag("use_rslora", False),
        targets=_read_names(fields, "target_modules"),
        excluded=_read_names(fields, "exclude_modules") if fields.has("exclude_modules") else (),
        layers=_read_layers(fields),
    )


def _pattern(section: Fields, name: str) -> re.Pattern[str]:
    """The regular expression that a key of a section of patterns is: of the last words of a name."""
    return _compiled(section, name, rf"(.*\.)?({name})$")


def _read_names(fields: Fields, key: str) -> re.Pattern[str] | tuple[str, ...]:
    value = fields.get(key)
    if value == ALL_LINEAR:
        return re.compile(".*")
    return _compiled(fields, key, value) if isinstance(value, str) else fields.texts(key)


def _read_layers(fields: Fields) -> frozenset[int] | None:
    value = fields.get("layers_to_transform")
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise fields.error("layers_to_transform", f"must be numbers of layers, not {value!r:.100}")
    return frozenset(numbers)


def _compiled(fields: Fields, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise fields.error(key, f"is no regular expression: {error}") from None


def _is_named(module: str, names: re.Pattern[str] | tuple[str, ...]) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _last_words(modules: Iterable[str]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in modules})
