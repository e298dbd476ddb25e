"""Structured output: which tokens a grammar lets come next. The only module that knows the grammar library.

A grammar is a text of the library's own, made from what the caller asked for and checked in front. A sequence's place
in it is a function of the grammar and of its own output, so that a restart with earlier output leads to the same masks.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import GRAMMAR_FAILED, RequestError
from paceline.sample.thinking import SequenceThinking
from paceline.structured_outputs import MAX_TAGS, StructuredOutputs
from paceline.tensors import LogitEdits
from paceline.types import TokenRules

if TYPE_CHECKING:
    from llguidance import LLParserLimits

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the tokens of JSON. Bounded, or a model may write blanks until its tokens are used up."""
FREE_TEXT = r"/(.|\n)*/"
DEAD_END = "no token of the model can come next"
COMPILED_KEPT = 64
"""Grammars that stay compiled for the next request with the same one."""
Bits = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Attributes:
    tokens: the bytes of each token, by id.
    special_ids: control tokens. They are no text to a grammar.
    encode: the tokens of a text as the tokenizer would cut it.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    encode: Callable[[bytes], list[int]]


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the latest ones. Safe to use from several threads.

    ``vocabulary`` is called when the first grammar is compiled: the library's view of 50,000 tokens takes a quarter of
    a second to build.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> str:
        """The grammar's text, for :attr:`TokenRules.grammar`. Raises RequestError naming the field of ``wanted``."""
        [form] = wanted.given
        param = f"structured_outputs.{form}"
        try:
            text = grammar_text(wanted)
            with self._lock:
                self._prototype(text)
        except GrammarError as error:
            raise RequestError(f"{param}: {error}", param) from None
        return text

    def matcher(self, grammar: str) -> Any:
        """A new matcher at the beginning of a grammar that :meth:`compile` gave."""
        with self._lock:
            return self._prototype(grammar).deep_copy()

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    def mask(self, matcher: Any) -> tuple[Bits, bool]:
        """Which tokens may come next, [ceil(vocab_size / 32)], and whether the text may end here."""
        end = self.vocab_size
        words = np.zeros(end // 32 + 1, np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bit = np.uint32(1 << end % 32)
        may_end = bool(words[-1] & bit)
        words[-1] &= ~bit
        return words[: -(-end // 32)], may_end

    def _prototype(self, grammar: str) -> Any:
        """A matcher that stays at the beginning, where its first mask was computed. The lock must be held."""
        from llguidance import LLMatcher

        matcher = self._compiled.get(grammar)
        if matcher is not None:
            self._compiled.move_to_end(grammar)
            return matcher
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            mask, _ = self.mask(matcher)
            if not matcher.is_error() and not mask.any():
                raise GrammarError(DEAD_END)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        self._compiled[grammar] = matcher
        if len(self._compiled) > COMPILED_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _tokenizer(self) -> Any:
        """The library's view of the vocabulary, with one token more: the end, so that no real token has to be it."""
        from llguidance import LLTokenizer, TokenizerWrapper

        end = self.vocab_size
        return LLTokenizer(TokenizerWrapper(_Library(self._vocabulary, end)), n_vocab=end + 1, eos_token=end)


class GrammarError(ValueError):
    """A grammar that cannot be compiled."""


class _Library:
    """A vocabulary under the names that the library looks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id = end
        self.tokens = [*vocabulary.tokens, b"<end of grammar>"]
        self.special_token_ids = [*sorted(vocabulary.special_ids), end]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


class SequenceGrammar:
    """One sequence's place in its grammar, a function of its rules and output.

    While the sequence thinks (see ``grammar_after`` and ``grammar_opener`` in TokenRules) everything is allowed but
    the model's end tokens: the text has not begun.

    Attributes:
        bits: [ceil(vocab_size / 32)] uint32, what the next token may be.
        complete: nothing may follow the output.
        error: why the sequence cannot go on, though it is not complete.
    """

    def __init__(
        self, grammars: Grammars, rules: TokenRules, output: Sequence[int], prompt: Sequence[int] = ()
    ) -> None:
        assert rules.grammar is not None
        self.complete = False
        self.error: str | None = None
        self._grammars = grammars
        self._matcher = grammars.matcher(rules.grammar)
        size = grammars.vocab_size
        self._end_bits = _bits((*rules.eos_token_ids, *rules.stop_token_ids), size)
        self._thinking_bits = ~_bits(rules.eos_token_ids, size)
        self._ends = {*rules.eos_token_ids, *rules.stop_token_ids}
        self._after = rules.grammar_after
        self._opener = rules.grammar_opener
        self._thinks = bool(self._after) and self._opener is None
        # A budget may go on closing the thinking once its end has come.
        self._budget: SequenceThinking | None = None
        if rules.thinking is not None and self._after:
            self._budget = SequenceThinking(rules.thinking, prompt, len(prompt))
        self._end_came = False
        self._output: list[int] = []
        self.bits = self._thinking_bits
        if not self._thinks:
            self._look()
        if self._opener is not None:
            self.bits = self.bits | _bits((self._opener,), size)
        # Token by token, as it was the first time: what the library keeps between steps counts towards its limits.
        for token in output:
            self.commit(token)

    def commit(self, token: int) -> None:
        """The output grows by ``token``. Never raises: a failure is told by :attr:`error`."""
        self._output.append(token)
        if self._budget is not None:
            self._budget.commit(token)
        if self.complete or self.error is not None:
            return
        if len(self._output) == 1 and token == self._opener:
            self._thinks, self.bits = True, self._thinking_bits
        elif self._thinks:
            self._end_came |= tuple(self._output[-len(self._after) :]) == self._after
            if self._end_came and (self._budget is None or self._budget.forced() is None):
                self._thinks = False
                self._look()
        elif token in self._ends:
            self.complete = True
        elif not self._matcher.consume_token(token):
            self._fail(_reason(self._matcher.get_error()))
        else:
            self._look()

    def _look(self) -> None:
        bits, may_end = self._grammars.mask(self._matcher)
        if self._matcher.is_error():
            self._fail(_reason(self._matcher.get_error()))
            return
        self.complete = may_end and not bits.any()
        self.bits = bits | self._end_bits if may_end else bits
        if not may_end and not bits.any():
            self._fail(DEAD_END)

    def _fail(self, reason: str) -> None:
        self.error = f"{GRAMMAR_FAILED}: {reason}"
        self.bits = np.zeros_like(self._end_bits)


def build_grammar_mask(sequences: Sequence[SequenceGrammar | None], width: int) -> LogitEdits | None:
    """The masks of R rows' grammars as edits of logits [R, ``width``] that change nothing else; None if none masks."""
    masked = [(row, sequence.bits) for row, sequence in enumerate(sequences) if sequence is not None]
    if not masked:
        return None
    bits = np.zeros((len(masked), -(-width // 32)), np.uint32)
    for i, (_, allowed) in enumerate(masked):
        count = min(len(allowed), bits.shape[1])
        bits[i, :count] = allowed[:count]
    num_rows = len(sequences)
    starts, nothing = np.zeros(num_rows + 1, np.int32), np.empty(0, np.int32)
    ones, zeros = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    return LogitEdits(
        vocab_size=width,
        allowed_rows=np.array([row for row, _ in masked], np.int32),
        allowed_bits=bits,
        bias_starts=starts,
        bias_ids=nothing,
        bias_values=np.empty(0, np.float32),
        seen_starts=starts,
        seen_ids=nothing,
        seen_counts=nothing,
        repetition=ones,
        frequency=zeros,
        presence=zeros,
        banned_starts=starts,
        banned_ids=nothing,
    )


# ---- from what a caller asks to a text of the library


def grammar_text(wanted: StructuredOutputs) -> str:
    """Raises GrammarError for what cannot be written down as a grammar; the library finds the rest."""
    if wanted.json_object:
        return json_grammar('{"type":"object"}', wanted)
    if wanted.json is not None:
        return json_grammar(str(wanted.json), wanted)
    if wanted.regex is not None:
        return _from_regex(wanted.regex)
    if wanted.choice is not None:
        return "start: " + " | ".join(quoted(choice) for choice in dict.fromkeys(wanted.choice))
    if wanted.structural_tag is not None:
        return _from_tags(json.loads(str(wanted.structural_tag)), wanted)
    assert wanted.grammar is not None
    return _from_grammar(wanted.grammar)


def quoted(text: str) -> str:
    """A string literal of the grammar language, which writes them as JSON does."""
    return json.dumps(text)


def json_grammar(schema: str, wanted: StructuredOutputs) -> str:
    """JSON that matches a schema, itself JSON, as a whole text."""
    return f"start: {inline_json(schema, wanted)}"


def inline_json(schema: str, wanted: StructuredOutputs | None = None) -> str:
    """JSON that matches a schema, as a part of a rule. Without ``wanted`` the usual separators, and no other blanks."""
    value = json.loads(schema)
    if wanted is None:
        options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    elif wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
    if value is False:
        raise GrammarError("nothing matches the schema false")
    # The library's own switches are ours to set, not the caller's.
    value = {**({} if value is True else value), "x-guidance": options}
    return "%json " + json.dumps(value)


def _from_regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(pattern))


def _from_grammar(text: str) -> str:
    if re.search(r"(?m)^\s*(%llguidance\b|start\s*:(?!:))", text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter's own kinds, and slips on odd input
        reason = _reason(str(error)) or type(error).__name__
        raise GrammarError(f"neither Lark with a rule start nor GBNF: {reason}") from None


@dataclass(frozen=True, slots=True)
class Tag:
    """A piece of grammar in free text. ``trigger``, with which ``begin`` begins, is where free text ends.

    ``body`` is a part of a rule.
    """

    trigger: str
    begin: str
    body: str
    end: str


def _from_tags(value: dict[str, Any], wanted: StructuredOutputs) -> str:
    structures, triggers = value.get("structures"), value.get("triggers")
    if "format" in value:
        raise GrammarError("only tags with structures and triggers are supported, not format")
    if not isinstance(structures, list) or not structures or len(structures) > MAX_TAGS:
        raise GrammarError(f"structures must be a list of 1 to {MAX_TAGS} tags")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("triggers must be a list of strings that is not empty")
    tags = []
    for index, item in enumerate(structures):
        where = f"structures[{index}]"
        if not isinstance(item, dict):
            raise GrammarError(f"{where} must be an object")
        begin, end, schema = item.get("begin"), item.get("end", ""), item.get("schema", True)
        if not isinstance(begin, str) or not isinstance(end, str):
            raise GrammarError(f"{where}: begin and end must be strings")
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"{where}.schema must be a schema")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"{where}.begin starts with none of the triggers")
        tags.append(Tag(trigger, begin, inline_json(json.dumps(schema), wanted), end))
    return tags_grammar(tags)


def tags_grammar(tags: Sequence[Tag]) -> str:
    """Free text with any number of these tags in it. After a trigger only its tags can follow."""
    lines = [f"start: ({' | '.join(f'group_{i}' for i in range(len({tag.trigger for tag in tags})))})* TEXT"]
    lines.append(f"TEXT: {FREE_TEXT}")
    by_trigger: dict[str, list[Tag]] = {}
    for tag in tags:
        by_trigger.setdefault(tag.trigger, []).append(tag)
    for number, (trigger, group) in enumerate(by_trigger.items()):
        lines.append(f"trigger_{number}[lazy]: TEXT {quoted(trigger)}")
        bodies = [
            " ".join(filter(None, (_literal(tag.begin[len(trigger) :]), tag.body, _literal(tag.end)))) for tag in group
        ]
        lines.append(f"group_{number}: trigger_{number} ({' | '.join(bodies)})")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return quoted(text) if text else ""


# ---- details


def _bits(ids: Sequence[int], size: int) -> Bits:
    """[ceil(size / 32)], the bit of each id below ``size`` set."""
    words = np.zeros(-(-size // 32), np.uint32)
    for token in ids:
        if token < size:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words


def _limits() -> LLParserLimits:
    """Compiling may take some 20 ms, a step of one sequence some 15 ms; a state of the lexer takes 1 to 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _reason(message: str) -> str:
    """The library's message on one line: its first, and what an excerpt of a pattern is followed by."""
    first, *rest = message.strip().splitlines() or [""]
    if first in ("NoExtension", "NoExtensionBias"):
        return DEAD_END
    details = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return " ".join([first, *details])[:300]
