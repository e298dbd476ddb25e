"""Tools that a request offers to the model: checked, and as a grammar where the model has to call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.model_info import ModelInfo
from paceline.errors import RequestError
from paceline.sample.grammar import inline_json, quoted
from paceline.structured_outputs import StructuredOutputs
from paceline.text.answer_formats import AnswerFormats, CallSyntax, ToolFormat

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request says of tools.

    Attributes:
        tools: as the template is given them; empty if none may be called.
        must: the names of which one has to be called; empty if the model may answer instead.
        parallel: whether there may be several calls.
    """

    tools: tuple[dict[str, Any], ...] = ()
    must: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def parse_tools(tools: object, choice: object, parallel: bool | None) -> ToolChoice:
    """From the fields of a request; None and no tools are absent. Raises RequestError naming the field."""
    given = _tools(tools)
    names = [tool["function"]["name"] for tool in given]
    must: tuple[str, ...] = ()
    if choice == REQUIRED:
        must = tuple(names)
    elif isinstance(choice, dict):
        must = (_chosen_name(choice),)
    elif choice not in (None, AUTO, NONE):
        raise RequestError(
            "tool_choice must be auto, none, required, or an object that names a function", "tool_choice"
        )
    if (choice == REQUIRED or must) and not given:
        raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    if must and not set(must) <= set(names):
        raise RequestError(f"tool_choice names {must[0][:60]!r}, which is none of the tools", "tool_choice")
    return ToolChoice(() if choice == NONE else tuple(given), must, parallel is not False)


def _tools(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", "tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise RequestError(f"{where} must be an object of the type function", "tools")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"{where}.function must be an object", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise RequestError(f"{where}.function.name must have 1 to 128 letters, digits, '_', '.' or '-'", "tools")
        if name in names:
            raise RequestError(f"tools has the name {name!r} twice", "tools")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{where}.function.description must be a string", "tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError(f"{where}.function.parameters must be a JSON schema", "tools")
    # Templates tell absence from null badly.
    return [
        {"type": "function", "function": {key: v for key, v in tool["function"].items() if v is not None}}
        for tool in tools
    ]


def _chosen_name(choice: dict[str, Any]) -> str:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            "tool_choice must be auto, none, required, or {type: function, function: {name}}", "tool_choice"
        )
    return name


def required_calls(info: ModelInfo, choice: ToolChoice) -> StructuredOutputs | None:
    """The form of an answer that has to be calls; None if it may be anything.

    Raises RequestError if the model cannot call tools.
    """
    if not choice.must:
        return None
    if info.formats.tools is None:
        raise RequestError(
            f"tool_choice: it is not known how {info.name} writes tool calls (tool_call_parser)", "tool_choice"
        )
    if info.chat_template is None or not info.chat_template.takes_tools:
        raise RequestError(f"tool_choice: the chat template of {info.name} does not show tools", "tool_choice")
    functions = [tool["function"] for tool in choice.tools if tool["function"]["name"] in choice.must]
    try:
        return StructuredOutputs(grammar=calls_grammar(info.formats, functions, parallel=choice.parallel))
    except RequestError as error:
        raise RequestError(f"tools as a grammar: {error}", "tools") from None


def calls_grammar(formats: AnswerFormats, functions: Sequence[dict[str, Any]], *, parallel: bool) -> str:
    """Lark for one call or several of these functions, written as the model's format has it.

    Raises RequestError (``tools``) for parameters that are no schema of an object.
    """
    tools, marks = formats.tools, formats.marks
    assert tools is not None
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for number, function in enumerate(functions):
        lines += _call_rules(tools, marks, f"call_{number}", function["name"], function.get("parameters") or {})
    calls = "call"
    if parallel and tools.separator:
        calls = f"call ({quoted(tools.separator)} call)*"
    begin, end = _mark(tools.begin, marks), _mark(tools.end, marks)
    padding = _text(tools.padding)
    if tools.bare_if_required:
        begin = ""
    lines.append(f"group: {_sequence(begin, padding, _text(tools.open), calls, _text(tools.close), padding, end)}")
    again = f"({_sequence(_text(tools.between), 'group')})*" if parallel and begin and not tools.separator else ""
    lines.append(f"start: {_sequence('group', again)}")
    return "\n".join(lines)


def _call_rules(
    tools: ToolFormat, marks: Mapping[str, int], rule: str, name: str, parameters: dict[str, Any]
) -> list[str]:
    # A function that says nothing of parameters has none.
    schema = {"type": "object", **(parameters or {"additionalProperties": False})}
    if tools.syntax is CallSyntax.PYTHON:
        return [f"{rule}: {quoted(name + '(')} {rule}_arguments {quoted(')')}", *_python_rules(rule, schema)]
    value = inline_json(json.dumps(schema))
    if tools.syntax is CallSyntax.NAME:
        return [f"{rule}: {_sequence(quoted(name), _mark(tools.before_arguments, marks), value)}"]
    opening = f'{{"name": {json.dumps(name)}, "{tools.arguments}": '
    return [f"{rule}: {quoted(opening)} {value} {quoted('}')}"]


def _python_rules(rule: str, schema: dict[str, Any]) -> list[str]:
    """Keyword arguments in the order of the schema, the required ones first."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(value, dict) for value in properties.values()):
        raise RequestError("the properties of a function's parameters must be schemas", "tools")
    if not isinstance(required, list):
        raise RequestError("required must be a list of names", "tools")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    must: list[str] = []
    may: list[str] = []
    for number, (name, inner) in enumerate(properties.items()):
        argument = f"{rule}_{number}"
        rules.append(f"{argument}: {quoted(name + '=')} {inline_json(json.dumps({**inner, **shared}))}")
        (must if name in required else may).append(argument)
    comma = quoted(", ")
    options = [
        _sequence(f" {comma} ".join([*must, *first]), *(f"({comma} {later})?" for later in rest))
        for first, rest in ([((), may)] if must else [((one,), may[i + 1 :]) for i, one in enumerate(may)])
    ]
    alternatives = " | ".join(options)
    return [*rules, f"{rule}_arguments: {alternatives if must else f'({alternatives})?' if options else quoted('')}"]


def _mark(text: str, marks: Mapping[str, int]) -> str:
    """A tag: the control token of that name, if there is one, or its text."""
    return f"<[{marks[text]}]>" if text in marks else _text(text)


def _text(text: str) -> str:
    return quoted(text) if text else ""


def _sequence(*parts: str) -> str:
    return " ".join(filter(None, parts))
