"""Command-line flags: made from the settings' dataclass, so that a setting has one name everywhere."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, get_type_hints

from paceline.config import EngineConfig

UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20,
         "g": 10**9, "gb": 10**9, "gib": 2**30}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes ``--max_model_len`` for ``--max-model-len`` and suggests the flag that was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([dashed(arg) for arg in given], namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            near = difflib.get_close_matches(unknown[1], self._all_flags(), n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        elif message.startswith("unrecognized arguments"):
            message += " (arguments without a dash must stand together, before or after all flags)"
        super().error(message)

    def _all_flags(self) -> list[str]:
        flags = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for sub in action.choices.values() for flag in sub._all_flags()]
        return flags


class AddAdapter(argparse.Action):
    """Adds ``NAME=PATH`` to a dict of adapters."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        name, _, path = values.partition("=")
        if not name or not path:
            raise argparse.ArgumentError(self, f"expected NAME=PATH, not {values!r:.100}")
        adapters = getattr(namespace, self.dest) or {}
        if name in adapters:
            raise argparse.ArgumentError(self, f"there are two adapters of the name {name!r:.100}")
        setattr(namespace, self.dest, {**adapters, name: path})


def dashed(argument: str) -> str:
    """``--some_flag=a_b`` -> ``--some-flag=a_b``; anything that is no long flag stays as it is."""
    if not re.match(r"--\w", argument):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def memory_size(text: str) -> int:
    """``2GiB``, ``512 MB`` or a number of bytes, as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (examples: 2GiB, 512MiB, 1073741824)")
    return int(float(match[1]) * UNITS[match[2].lower()])


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineConfig but the model, explained by the class's own words."""
    group = parser.add_argument_group("engine")
    types = get_type_hints(EngineConfig)
    docs = attribute_docs(EngineConfig)
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        flag = "--" + field.name.replace("_", "-")
        text = docs[field.name].replace("``", "").replace("%", "%%")
        if field.default is not None:
            text += f" [{field.default}]"
        if types[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif field.name == "lora":
            group.add_argument(flag, action=AddAdapter, default=field.default, help=text, metavar="NAME=PATH")
        else:
            kind = memory_size if field.name == "kv_cache_memory" else _plain_type(types[field.name])
            group.add_argument(flag, type=kind, default=field.default, help=text, metavar=kind.__name__.upper())


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def attribute_docs(owner: type) -> dict[str, str]:
    """The entries of a docstring's ``Attributes`` section, by name, each on one line."""
    section = (owner.__doc__ or "").partition("Attributes:")[2]
    entries: dict[str, str] = {}
    for match in re.finditer(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE):
        entries[match[1]] = " ".join(match[2].split())
    return entries


def _plain_type(hint: Any) -> type:
    """``int | None`` -> ``int``."""
    options: Sequence[Any] = [option for option in getattr(hint, "__args__", (hint,)) if option is not type(None)]
    return options[0]  # type: ignore[no-any-return]
