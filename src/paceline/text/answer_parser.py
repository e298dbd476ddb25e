"""An answer's text taken apart while it grows: thinking, content, tool calls.

One machine reads all formats of :mod:`~paceline.text.answer_formats`, character by character, so that how the text was
cut into pieces cannot matter. It gives out what is certain and holds back what is not: the beginning of a tag, white
space that may be trimmed, a call whose name is not known yet.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from enum import Enum

from paceline.text.answer_formats import ARGUMENT_KEYS, CallSyntax, ReasoningFormat, ToolFormat

END = ""
"""What is read behind the last character."""
KNOWN_KEYS = ("name", *ARGUMENT_KEYS, "type", "id")
MAX_NAME_CHARS = 256

Read = Generator[None, str, str]
Step = Generator[None, str, None]
Try = Generator[None, str, bool]


class Thinking(Enum):
    """What a prompt says of the output: it has begun to think, it may begin, or it does not think."""

    OPEN = "open"
    POSSIBLE = "possible"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. For a call, ``call`` is its number; ``name`` comes in the first of its pieces, alone."""

    reasoning: str = ""
    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""

    @property
    def kind(self) -> tuple[int | None, bool]:
        """Equal for pieces that can be joined, unless they name a call."""
        return self.call, bool(self.reasoning)


class AnswerParser:
    """Takes one answer apart. The pieces of all pushes and of :meth:`finish` join to the same whole in any cutting.

    White space around thinking and calls is left out. Calls that are not of the format are content; one that turns out
    so behind its name has what there was of its arguments.

    Args:
        reasoning: None: nothing is thinking.
        thinking: how the output starts.
        tools: None: nothing is a call.
        names: the tools; a call that no tag announces must be of one of them.
        parallel: if not, all calls but the first are left out.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        thinking: Thinking = Thinking.OFF,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
        parallel: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._names = frozenset(names)
        self._parallel = parallel
        self._out: list[Piece] = []
        self._unread = ""
        self._blanks = ""
        self._trims = False
        self._has_content = False
        self.num_calls = 0
        self._machine = self._read_answer(thinking)
        next(self._machine)

    def push(self, text: str) -> list[Piece]:
        """What these characters make certain."""
        for character in text:
            self._machine.send(character)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back, once it is clear that nothing follows."""
        try:
            while True:
                self._machine.send(END)
        except StopIteration:
            return self._take()

    def _take(self) -> list[Piece]:
        """The new pieces, neighbours of one kind joined."""
        pieces: list[Piece] = []
        for piece in self._out:
            last = pieces[-1] if pieces else None
            if last is not None and last.kind == piece.kind and piece.name is None and last.name is None:
                pieces[-1] = Piece(
                    last.reasoning + piece.reasoning,
                    last.content + piece.content,
                    last.call,
                    None,
                    last.arguments + piece.arguments,
                )
            else:
                pieces.append(piece)
        self._out.clear()
        return pieces

    # ---- reading

    def next(self) -> Read:
        """The next character; END behind the last, as often as it is read."""
        if self._unread:
            character, self._unread = self._unread[0], self._unread[1:]
            return character
        return (yield)

    def give_back(self, text: str) -> None:
        self._unread = text + self._unread

    def _match(self, wanted: str) -> Try:
        """Whether ``wanted`` comes next, after white space; if not, nothing was read."""
        read = ""
        while read.lstrip() != wanted:
            character = yield from self.next()
            read += character
            if character == END or not wanted.startswith(read.lstrip()):
                self.give_back(read)
                return False
        return True

    # ---- the answer as a whole

    def _read_answer(self, thinking: Thinking) -> Step:
        reasoning = self._reasoning
        if reasoning is not None and thinking is not Thinking.OFF:
            opened = yield from self._match(reasoning.begin)
            if opened or thinking is Thinking.OPEN:
                yield from self._read_thinking(reasoning)
                self._trims = True
                if reasoning.answer_begin:
                    yield from self._match(reasoning.answer_begin)
        yield from self._read_content()
        if self._blanks and not self._trims and self.num_calls == 0:
            self._out.append(Piece(content=self._blanks))

    def _read_thinking(self, reasoning: ReasoningFormat) -> Step:
        blanks, begun, held = "", False, ""
        while held != reasoning.end:
            character = yield from self.next()
            at_end = character == END
            held += character
            while held and (at_end or not reasoning.end.startswith(held)):
                character, held = held[0], held[1:]
                if character.isspace():
                    blanks += character
                    continue
                self._out.append(Piece(reasoning=(blanks if begun else "") + character))
                blanks, begun = "", True
            if at_end:
                return

    def _read_content(self) -> Step:
        tools = self._tools
        end_mark = self._reasoning.answer_end if self._reasoning is not None and self._trims else ""
        marks = [mark for mark in (tools.begin if tools else "", end_mark) if mark]
        if tools is not None and tools.bare:
            while (yield from self._read_calls(tools, "")):
                pass
        held = ""
        while True:
            character = yield from self.next()
            at_end = character == END
            held += character
            while held and (at_end or not any(mark.startswith(held) for mark in marks)):
                self._say(held[0])
                held = held[1:]
            if at_end:
                return
            if held in marks:
                mark, held = held, ""
                if tools is not None and mark == tools.begin:
                    yield from self._read_calls(tools, mark)

    def _say(self, text: str) -> None:
        """Add to the content. White space waits for what follows it."""
        for character in text:
            if character.isspace():
                self._blanks += character
                continue
            keeps = self._has_content or not (self._trims or self.num_calls)
            self._out.append(Piece(content=(self._blanks if keeps else "") + character))
            self._blanks, self._has_content = "", True

    # ---- calls

    def _read_calls(self, tools: ToolFormat, mark: str) -> Try:
        """Whether there are calls behind ``mark``. If not, the mark and what was read are content."""
        reader = _CallReader(self, tools, announced=bool(mark))
        if not (yield from reader.read()):
            self._say(mark + reader.read_so_far)
            return False
        if tools.end:
            yield from self._match(tools.end)
        return True

    def begin_call(self, name: str) -> int:
        """Count a call, and tell of it if it is wanted."""
        self._blanks = ""
        number = self.num_calls
        self.num_calls += 1
        if self._is_wanted(number):
            self._out.append(Piece(call=number, name=name))
        return number

    def add_arguments(self, number: int, text: str) -> None:
        if text and self._is_wanted(number):
            self._out.append(Piece(call=number, arguments=text))

    def _is_wanted(self, number: int) -> bool:
        return self._parallel or number == 0

    def is_tool(self, name: str) -> bool:
        return name in self._names


class _CallReader:
    """Reads calls that stand together. ``read_so_far`` is what it read before the first was certain."""

    def __init__(self, parser: AnswerParser, tools: ToolFormat, *, announced: bool) -> None:
        self._parser = parser
        self._tools = tools
        self._announced = announced
        self._begun = False
        self.read_so_far = ""

    def read(self) -> Try:
        """Whether there was a call."""
        tools = self._tools
        first = yield from self._skip_blanks()
        syntax, bracket = tools.syntax, tools.open
        if self._announced and syntax is not CallSyntax.PYTHON:
            # Both ways to write calls behind the same tag are understood.
            bracket = "[" if first == "[" else ""
            if first in ("[", "{"):
                syntax = CallSyntax.OBJECT
            elif tools.before_arguments:
                syntax = CallSyntax.NAME
        if bracket:
            if first != bracket:
                self._back(first)
                return False
            first = yield from self._skip_blanks()
        closing = "]" if bracket else ""
        while True:
            if not (yield from self._read_call(syntax, first)):
                return self._begun
            if not closing and not tools.separator:
                return True
            following = yield from self._skip_blanks()
            if following == closing and closing:
                return True
            if following not in (tools.separator.strip() or ",", ","):
                self._back(following)
                return True
            first = yield from self._skip_blanks()

    def _read_call(self, syntax: CallSyntax, first: str) -> Try:
        if syntax is CallSyntax.OBJECT:
            return (yield from self._read_object(first))
        if syntax is CallSyntax.NAME:
            return (yield from self._read_named(first))
        return (yield from self._read_python(first))

    def _read_object(self, first: str) -> Try:
        """``{"name": ..., "arguments": ...}``, in any order."""
        if first != "{":
            self._back(first)
            return False
        number: int | None = None
        early: str | None = None
        character = yield from self._skip_blanks()
        while character != "}":
            if character != '"':
                self._back(character)
                return number is not None
            key = _decoded((yield from self._read_string()))
            colon = yield from self._skip_blanks()
            if colon != ":" or not isinstance(key, str) or (key not in KNOWN_KEYS and not self._announced):
                self._back(colon)
                return number is not None
            character = yield from self._skip_blanks()
            if key == "name" and number is None and character == '"':
                name = _decoded((yield from self._read_string()))
                if not isinstance(name, str) or not self._begins(name):
                    return False
                number = self._parser.begin_call(name)
                self._parser.add_arguments(number, early or "")
            elif key in ARGUMENT_KEYS and character == '"':
                # Some write the arguments as a text that holds them.
                text = yield from self._read_string()
                inner = _decoded(text)
                early = inner if isinstance(inner, str) else text
                if number is not None:
                    self._parser.add_arguments(number, early)
            elif key in ARGUMENT_KEYS:
                early = yield from self._read_value(character, number)
            else:
                yield from self._read_value(character, None)
            character = yield from self._skip_blanks()
            if character == ",":
                character = yield from self._skip_blanks()
            elif character != "}":
                self._back(character)
                return number is not None
        if number is not None and early is None:
            self._parser.add_arguments(number, "{}")
        return number is not None

    def _read_named(self, first: str) -> Try:
        """A name, and its arguments behind a mark or directly."""
        name, mark = first, self._tools.before_arguments
        while len(name) <= MAX_NAME_CHARS + len(mark):
            character = yield from self._read_one()
            if character in (END, "\n"):
                return False
            if character == "{":
                name = name.removesuffix(mark).strip()
                if not self._begins(name):
                    return False
                number = self._parser.begin_call(name)
                yield from self._read_value(character, number)
                return True
            name += character
        return False

    def _read_python(self, first: str) -> Try:
        """``name(key=value, ...)``: the arguments come as JSON, each as soon as it is complete."""
        name, character = "", first
        while character.isalnum() or (character and character in "_.-"):
            name += character
            character = yield from self._read_one()
        if character != "(" or not self._begins(name):
            self._back(character)
            return False
        number = self._parser.begin_call(name)
        separator = "{"
        while True:
            text, character = yield from self._read_python_argument()
            if character == END:
                return True
            key, equals, value = text.partition("=")
            if equals:
                self._parser.add_arguments(number, f"{separator}{json.dumps(key.strip())}: {_python_as_json(value)}")
                separator = ", "
            if character != ",":
                self._parser.add_arguments(number, "}" if separator == ", " else "{}")
                return True

    def _read_python_argument(self) -> Generator[None, str, tuple[str, str]]:
        """The text up to a comma or parenthesis outside brackets and quotes, and that character."""
        text, depth, quote = "", 0, ""
        while True:
            character = yield from self._read_one()
            if character == END or (depth == 0 and not quote and character in ",)"):
                return text, character
            text += character
            if quote:
                if character == "\\":
                    text += yield from self._read_one()
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")

    def _begins(self, name: str) -> bool:
        """Whether this can be a call's name. From then on nothing can be taken back."""
        if not name or (not self._announced and not self._begun and not self._parser.is_tool(name)):
            return False
        self._begun = True
        return True

    # ---- JSON, by its outline

    def _read_string(self) -> Read:
        """The rest of a string whose quote was read; the string with its quotes."""
        text = '"'
        while True:
            character = yield from self._read_one()
            text += character
            if character == "\\":
                text += yield from self._read_one()
            elif character in ('"', END):
                return text

    def _read_value(self, character: str, number: int | None) -> Read:
        """The text of a value that begins with ``character``; told as arguments of the call ``number``, as it comes."""
        depth, quoted, text = 0, False, ""
        while character != END:
            if not quoted and depth == 0 and character in ",}]" and text:
                self._back(character)
                break
            text += character
            if number is not None:
                self._parser.add_arguments(number, character)
            if quoted and character == "\\":
                escaped = yield from self._read_one()
                text += escaped
                if number is not None:
                    self._parser.add_arguments(number, escaped)
            elif character == '"':
                quoted = not quoted
            elif not quoted:
                depth += (character in "{[") - (character in "}]")
            if depth == 0 and not quoted and character in '}]"':
                break
            character = yield from self._read_one()
        return text

    # ---- characters

    def _read_one(self) -> Read:
        character = yield from self._parser.next()
        if not self._begun:
            self.read_so_far += character
        return character

    def _skip_blanks(self) -> Read:
        character = yield from self._read_one()
        while character != END and character.isspace():
            character = yield from self._read_one()
        return character

    def _back(self, character: str) -> None:
        """Read it again: by whoever goes on, as content if no call has begun."""
        if not self._begun:
            self.read_so_far = self.read_so_far.removesuffix(character) if character else self.read_so_far
        self._parser.give_back(character)


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def _python_as_json(text: str) -> str:
    """A Python or JSON literal as JSON; what is neither is taken for a text."""
    for read in (_decode_strictly, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(text.strip(), ensure_ascii=False)


def _decode_strictly(text: str) -> object:
    return json.loads(text)
