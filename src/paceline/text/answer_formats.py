"""How models write thinking and tool calls into their text: one table of formats for each, and how to tell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from paceline.errors import ConfigError
from paceline.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thinking before the answer.

    Attributes:
        begin, end: what stands around the thinking. ``begin`` counts at the start of an output only.
        always: an output thinks even if neither it nor the prompt says so.
        answer_begin, answer_end: what may stand around the answer after it.
    """

    name: str
    begin: str
    end: str
    always: bool = False
    answer_begin: str = ""
    answer_end: str = ""


class CallSyntax(Enum):
    """How one call is written.

    OBJECT: ``{"name": "f", "arguments": {...}}``. NAME: ``f{...}``, with something between the two. PYTHON: ``f(a=1)``.
    """

    OBJECT = "object"
    NAME = "name"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls in an answer: ``begin open call separator call close end``, any number of times.

    Attributes:
        begin: what comes before calls; empty: they are at the start of the answer, or nowhere.
        end: what comes after them.
        padding: white space between ``begin`` or ``end`` and what they enclose.
        open, close: around the calls, between ``begin`` and ``end``.
        separator: between two calls of these; empty: there is one.
        between: between ``end`` and the next ``begin``.
        bare: calls may come without ``begin`` at the start of the answer; small models leave it out.
        bare_if_required: and that is how they are written where they are required.
        arguments: the key of the arguments in an OBJECT. Both of :data:`ARGUMENT_KEYS` are understood.
        before_arguments: what stands between name and arguments of a NAME call. An OBJECT format that has it
            understands both ways to write a call.
        id_prefix, id_length: ids of calls; some templates take ids of one form only.
    """

    name: str
    syntax: CallSyntax
    begin: str = ""
    end: str = ""
    padding: str = ""
    open: str = ""
    close: str = ""
    separator: str = ""
    between: str = "\n"
    bare: bool = False
    bare_if_required: bool = False
    arguments: str = "arguments"
    before_arguments: str = ""
    id_prefix: str = "call_"
    id_length: int = 24


ARGUMENT_KEYS = ("arguments", "parameters")

_THINK = ReasoningFormat("qwen3", "<think>", "</think>")
_ERNIE_THINK = ReasoningFormat("ernie", "<think>", "</think>", answer_begin="<response>", answer_end="</response>")
_DEEPSEEK_THINK = ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True)

REASONING_FORMATS = {
    "qwen3": _THINK,
    "deepseek_r1": _DEEPSEEK_THINK,
    "ernie": _ERNIE_THINK,
    "ernie45": _ERNIE_THINK,
    "ernie_x1": _ERNIE_THINK,
    "ernie_45_vl": _ERNIE_THINK,
    "ernie_45_vl_thinking": _ERNIE_THINK,
}
"""By the names that ``reasoning_parser`` takes."""

_HERMES = ToolFormat("hermes", CallSyntax.OBJECT, begin="<tool_call>", end="</tool_call>", padding="\n", bare=True)
_MISTRAL = ToolFormat(
    "mistral", CallSyntax.OBJECT, begin="[TOOL_CALLS]", open="[", close="]", separator=", ", between="",
    before_arguments="[ARGS]", id_prefix="", id_length=9,
)  # fmt: skip
_MISTRAL_ARGS = ToolFormat(
    "mistral_args", CallSyntax.NAME, begin="[TOOL_CALLS]", between="", before_arguments="[ARGS]", id_prefix="",
    id_length=9,
)  # fmt: skip
_LLAMA3 = ToolFormat(
    "llama3_json",
    CallSyntax.OBJECT,
    begin="<|python_tag|>",
    separator="; ",
    bare=True,
    bare_if_required=True,
    arguments="parameters",
)
_PYTHONIC = ToolFormat("pythonic", CallSyntax.PYTHON, open="[", close="]", separator=", ", bare=True)

TOOL_FORMATS = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_json": _HERMES,
    "ernie": _HERMES,
    "ernie45": _HERMES,
    "ernie_x1": _HERMES,
    "ernie_45_vl_thinking": _HERMES,
    "llama3_json": _LLAMA3,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL_ARGS,
}
"""By the names that ``tool_call_parser`` takes."""

Format = TypeVar("Format")


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of this name; "auto" finds it in the text of the chat template. Raises ConfigError."""
    return _find("reasoning_parser", name, REASONING_FORMATS, lambda: _detect_reasoning(template))


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of this name; "auto" finds it in the text of the chat template. Raises ConfigError."""
    return _find("tool_call_parser", name, TOOL_FORMATS, lambda: _detect_tools(template))


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """A model's formats, with their tags as tokens.

    Attributes:
        reasoning, tools: None: the model does not think or call tools, or nobody knows how.
        think_begin, think_end: the tokens of the tags of the thinking.
        marks: the tags that are one control token, with its id.
    """

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    think_begin: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)

    def shown_ids(self, *, calls: bool) -> frozenset[int]:
        """Control tokens that the text of an answer must show if thinking, and ``calls``, are to be found in it."""
        of_calls = set() if self.tools is None else set(_call_tags(self.tools))
        return frozenset(token for tag, token in self.marks.items() if calls or tag not in of_calls)


def _call_tags(tools: ToolFormat) -> list[str]:
    return [tools.begin, tools.end, tools.before_arguments]


def answer_formats(reasoning: ReasoningFormat | None, tools: ToolFormat | None, tokenizer: Tokenizer) -> AnswerFormats:
    """Looks up the formats' tags in the vocabulary."""

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.spellings(text)[0])

    tags: list[str] = []
    if reasoning is not None:
        tags += [reasoning.begin, reasoning.end, reasoning.answer_begin, reasoning.answer_end]
    if tools is not None:
        tags += _call_tags(tools)
    ids = {tag: tokens(tag) for tag in tags if tag}
    return AnswerFormats(
        reasoning,
        tools,
        () if reasoning is None else ids[reasoning.begin],
        () if reasoning is None else ids[reasoning.end],
        {tag: found[0] for tag, found in ids.items() if len(found) == 1 and found[0] in tokenizer.special_ids},
    )


def _find(setting: str, name: str, table: Mapping[str, Format], detect: Callable[[], Format | None]) -> Format | None:
    plain = name.replace("-", "_").lower()
    if plain == AUTO:
        return detect()
    if plain == NONE:
        return None
    if plain not in table:
        raise ConfigError(f"{setting} must be {AUTO}, {NONE} or one of {', '.join(table)}, not {name!r:.60}")
    return table[plain]


def _detect_reasoning(template: str) -> ReasoningFormat | None:
    if _THINK.end not in template:
        return None
    return _ERNIE_THINK if _ERNIE_THINK.answer_begin in template else _THINK


def _detect_tools(template: str) -> ToolFormat | None:
    if _MISTRAL.begin in template:
        return _MISTRAL_ARGS if _MISTRAL_ARGS.before_arguments in template else _MISTRAL
    # The same tags stand around another syntax in some templates.
    if _HERMES.begin in template and "<function=" not in template and "<arg_key>" not in template:
        return _HERMES
    return _LLAMA3 if _LLAMA3.begin in template else None
