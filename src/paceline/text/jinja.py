"""The Jinja dialect in which chat templates are written, with an end to every loop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 32 * 2**20
MAX_POWER_BITS = 4096


class TemplateTimeoutError(Exception):
    """A template ran past its deadline."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with what templates of models expect: ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes
    nothing, loop controls, and a ``generation`` block, which has no effect.

    Every turn of a loop and every call looks at :attr:`deadline` (seconds of ``time.monotonic``): Jinja has no other
    way to go on for ever. This guards against runaway templates; it does not make it safe to take one from strangers,
    since memory can still be exhausted.
    """

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.deadline = float("inf")
        self.filters["tojson"] = _to_json
        self.filters[_TIMED] = self._timed
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.check_deadline()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _power_bits(left, right) > MAX_POWER_BITS:
            raise SecurityError("a power in the template is too large")
        if operator == "*" and _repeated_length(left, right) > MAX_OUTPUT_CHARS:
            raise SecurityError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)

    def check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateTimeoutError

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_deadline()
            yield item


_TIMED = " timed"  # a filter that no template can name


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the answers in a training text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _power_bits(base: object, exponent: object) -> int:
    return base.bit_length() * exponent if isinstance(base, int) and isinstance(exponent, int) else 0


def _repeated_length(left: object, right: object) -> int:
    """Length of a sequence times a number."""
    for items, count in ((left, right), (right, left)):
        if isinstance(items, Sized) and isinstance(count, int):
            return len(items) * count
    return 0
