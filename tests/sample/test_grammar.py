"""A sequence's place in a grammar is a function of its output, and the mask is a row's own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.ops.reference import ReferenceOps
from paceline.sample.grammar import COMPILED_KEPT, Grammars, SequenceGrammar, Vocabulary, build_grammar_mask
from paceline.sample.sampler import Sampler
from paceline.sample.state import SamplerState
from paceline.structured_outputs import StructuredOutputs
from paceline.types import TokenRules

TOKENS = [bytes([byte]) for byte in range(128)] + [b"<s>", b"", b'{"', b"true", b"ab", b"\xc3", b"\xa9"]
SIZE = len(TOKENS)
END = 128


def make() -> Grammars:
    return Grammars(lambda: Vocabulary(TOKENS, frozenset([END]), lambda data: list(data)))


GRAMMARS = make()


def rules_of(*, after: tuple[int, ...] = (), opener: int | None = None, **form: object) -> TokenRules:
    grammar = GRAMMARS.compile(StructuredOutputs(**form))  # type: ignore[arg-type]
    return TokenRules(eos_token_ids=(END,), grammar=grammar, grammar_after=after, grammar_opener=opener)


def allowed(sequence: SequenceGrammar) -> set[int]:
    bits = np.unpackbits(sequence.bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:SIZE]).tolist())


def spelt(sequence: SequenceGrammar) -> set[bytes]:
    return {TOKENS[token] for token in allowed(sequence)}


def after(text: bytes, **form: object) -> SequenceGrammar:
    return SequenceGrammar(GRAMMARS, rules_of(**form), list(text))


@pytest.mark.parametrize(
    ("form", "text", "expected", "complete"),
    [
        ({"regex": "ab?"}, b"", {b"a", b"ab"}, False),
        ({"regex": "ab?"}, b"a", {b"b", b"<s>"}, False),
        ({"regex": "ab?"}, b"ab", {b"<s>"}, True),
        ({"regex": "^a/b\n$"}, b"a/", {b"b"}, False),
        ({"choice": ["a\"b", "a\\", "a\n"]}, b"a", {b'"', b"\\", b"\n"}, False),
        ({"choice": ["\u00e9", "\U0001f600"]}, b"", {b"\xc3"}, False),
        ({"json": {"type": "boolean"}}, b"", {b"t", b"f", b"true"}, False),
        ({"json": True}, b"1", {TOKENS[i] for i in b"0123456789.eE"} | {b"<s>"}, False),
        ({"json": '{"type": "integer", "maximum": 9, "minimum": 8}'}, b"", {b"8", b"9"}, False),
        ({"json_object": True, "disable_any_whitespace": True}, b"{", {b'"', b"}"}, False),
        ({"grammar": 'start: "x" y\ny: "1" | "2" y'}, b"x2", {b"1", b"2"}, False),
        ({"grammar": 'root ::= "x" y\ny ::= "1" | "2" y'}, b"x2", {b"1", b"2"}, False),
        ({"grammar": 'start: "x" <s> "y"'}, b"x", {b"<s>"}, False),
        (
            {"structural_tag": {"structures": [{"begin": "<f>", "schema": {"const": 1}}], "triggers": ["<f"]}},
            b"free <f>", {b"1"}, False,
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # workers must agree on a test's name
)  # fmt: skip
def test_what_may_come_next(form: dict[str, object], text: bytes, expected: set[bytes], complete: bool) -> None:
    sequence = after(text, **form)
    assert (spelt(sequence), sequence.complete, sequence.error) == (expected, complete, None)


FORMS = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": "(a|b)*abb"},
    {"structural_tag": {"structures": [{"begin": "a<", "schema": {}, "end": ">"}], "triggers": ["a<"]}},
    {"choice": ["a", "ab", "abc"], "after": (5, 6)},
    {"regex": "[a-c]+", "after": (5,), "opener": 9},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_restart_at_any_point_leads_to_the_same_masks(form: dict[str, object]) -> None:
    rng = random.Random(str(form))
    rules = rules_of(**form)  # type: ignore[arg-type]
    for _ in range(5):
        along = SequenceGrammar(GRAMMARS, rules, [])
        output: list[int] = []
        while len(output) < 25 and not along.complete:
            # Another's steps in between, which share what was compiled.
            SequenceGrammar(make() if rng.random() < 0.1 else GRAMMARS, rules, output)
            choices = sorted(allowed(along))
            output.append(6 if output[-1:] == [5] else rng.choice(choices + [5, 6] * (5 in choices)))
            along.commit(output[-1])
            restarted = SequenceGrammar(make(), rules, output)
            assert restarted.bits.tolist() == along.bits.tolist()
            assert (restarted.complete, restarted.error) == (along.complete, along.error)


def test_while_a_sequence_thinks_all_but_its_end_is_allowed() -> None:
    sequence = SequenceGrammar(GRAMMARS, rules_of(choice=["a"], after=(5, 6)), [])
    for token in (97, 5, 5):
        assert allowed(sequence) == set(range(SIZE)) - {END}
        sequence.commit(token)
    sequence.commit(6)
    assert spelt(sequence) == {b"a"}


def test_an_opener_is_allowed_as_the_first_token_only() -> None:
    sequence = SequenceGrammar(GRAMMARS, rules_of(regex="aab", after=(5,), opener=9), [])
    assert allowed(sequence) == {97, 9}
    sequence.commit(97)
    assert spelt(sequence) == {b"a"}


def test_a_dead_end_is_an_error_of_the_sequence() -> None:
    sequence = after(b"a", choice=["a\U0001f600", "b"])
    assert sequence.error is not None
    assert allowed(sequence) == set()
    sequence.commit(98)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "thing"}}, "Invalid type"),
        ({"json": {"not": {"type": "null"}}}, "Unimplemented"),
        ({"json": False}, "nothing matches"),
        ({"json": {"$ref": "http://example.com/x"}}, "http://example.com/x"),
        ({"regex": "(("}, "unclosed"),
        ({"regex": "a(?!b)"}, "look-around"),
        ({"regex": ""}, "not empty"),
        ({"regex": "[\U0001f600\U0001f601]"}, "no token"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "whatever"}, "GBNF"),
        ({"grammar": 'start: ""'}, "no token"),
        ({"grammar": "root ::= " + "(" * 5000}, "nested too deeply"),
        ({"grammar": "start: <unheard-of>"}, "special token"),
        ({"structural_tag": {"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}}, "triggers"),
        ({"structural_tag": {"format": {}}}, "format"),
        ({"whitespace_pattern": "((", "json_object": True}, "unclosed"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_is_refused_by_name(form: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=f"(?i){message}") as caught:
        rules_of(**form)  # type: ignore[arg-type]
    assert caught.value.param is not None
    assert caught.value.param.startswith("structured_outputs.")


def test_the_library_switches_of_a_schema_are_not_the_callers() -> None:
    sequence = after(b"{", json={"type": "object", "x-guidance": {"whitespace_pattern": "x*"}})
    assert b"x" not in spelt(sequence)


def test_only_the_latest_grammars_are_kept() -> None:
    grammars = make()
    texts = [grammars.compile(StructuredOutputs(choice=[f"a{i}"])) for i in range(COMPILED_KEPT + 5)]
    assert len(grammars._compiled) == COMPILED_KEPT
    assert SequenceGrammar(grammars, TokenRules(grammar=texts[0]), [97]).error is None


def test_a_mask_changes_its_own_row_only() -> None:
    width = SIZE + 3
    logits = np.random.default_rng(1).normal(size=(3, width)).astype(np.float32)
    mask = build_grammar_mask([None, after(b"", regex="a|b"), None], width)
    assert mask is not None
    masked = logits.copy()
    ReferenceOps().edit_logits(masked, mask)
    assert np.array_equal(masked[[0, 2]], logits[[0, 2]])
    kept = np.flatnonzero(np.isfinite(masked[1]))
    assert kept.tolist() == [97, 98]
    assert np.array_equal(masked[1][kept], logits[1][kept])
    assert build_grammar_mask([None, None], width) is None


def test_raw_logprobs_are_those_among_what_the_grammar_allows() -> None:
    state = SamplerState(1, SIZE, GRAMMARS)
    rules = rules_of(regex="a|b")
    state.start(0, TokenRules(**{n: getattr(rules, n) for n in ("grammar", "eos_token_ids")}, logprobs=2), [1], 1)
    logits = np.zeros((1, SIZE), np.float32)
    logits[0, 97] = 1.0
    [pick] = Sampler(ReferenceOps(), state).sample(logits, [0], [1])
    assert pick.logprobs is not None
    assert pick.logprobs.top_ids == (97, 98)
    assert np.exp(pick.logprobs.top_logprobs).sum() == pytest.approx(1.0)
