"""What a grammar lets through is what was asked for, also after preemptions and beside requests without one."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.engine.engine import Engine
from paceline.engine.load import grammar_vocabulary
from paceline.models.weights import load_model
from paceline.ops.cpu import CpuOps
from paceline.runner.runner import ModelRunner
from paceline.sample.grammar import Grammars
from paceline.structured_outputs import StructuredOutputs
from paceline.types import FinishReason, ThinkingBudget, TokenRules
from support.random_model import random_checkpoint
from support.random_schemas import random_schema
from support.small_text import END, EOS, START, byte_tokenizer

CONTEXT = 768
NUM_SCHEMAS = 200
TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(lambda: grammar_vocabulary(TOKENIZER))
OPS = CpuOps(1)
MODEL = load_model(random_checkpoint(vocab_size=264, max_position_embeddings=CONTEXT), OPS, max_positions=CONTEXT)


def make_engine(num_blocks: int, budget: int, max_num_seqs: int) -> Engine:
    runner = ModelRunner(
        MODEL,
        OPS,
        OPS.make_kv(MODEL.kv_layout, num_blocks, 8),
        max_num_seqs=max_num_seqs,
        max_model_len=CONTEXT,
        vocab_size=TOKENIZER.vocab_size,
        grammars=GRAMMARS,
    )
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=CONTEXT)
    return Engine(Scheduler(limits, KvManager(num_blocks, 8)), runner)


def answers(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], FinishReason | None]]:
    for request in requests:
        engine.add(Request(request.request_id, list(request.tokens), request.rules))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, FinishReason | None] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason
    return {name: (output, ends[name]) for name, output in tokens.items()}


def text_of(output: list[int]) -> str:
    return TOKENIZER.decode(output, skip_special=True)


@pytest.mark.slow
def test_every_output_validates_in_company_and_after_preemption() -> None:
    rng = random.Random(20)
    preemptions = finished = 0
    for first in range(0, NUM_SCHEMAS, 10):
        schemas, requests = {}, []
        for number in range(first, first + 10):
            schema = random_schema(rng)
            wanted = StructuredOutputs(
                json=schema, disable_any_whitespace=rng.random() < 0.5, whitespace_pattern=rng.choice([None, " ?"])
            )
            grammar = GRAMMARS.compile(wanted)
            for run in range(2):
                name = f"{number}-{run}"
                schemas[name] = schema
                rules = TokenRules(
                    temperature=rng.choice([0.5, 1.0]), seed=rng.getrandbits(64), max_tokens=600,
                    eos_token_ids=rng.choice([(), (EOS,)]), min_tokens=rng.choice([0, 0, 5]), grammar=grammar,
                )  # fmt: skip
                requests.append(Request(name, [rng.randrange(256) for _ in range(rng.randint(1, 30))], rules))
        for number in range(3):
            free = TokenRules(seed=number, max_tokens=100, top_p=0.9)
            requests.append(Request(f"free-{number}", [5, number], free))
        rng.shuffle(requests)
        engine = make_engine(82, rng.choice([7, 32, 100]), 8)
        for name, (output, end) in answers(engine, requests).items():
            if name in schemas and end is FinishReason.STOP:
                finished += 1
                value = json.loads(text_of(output))
                jsonschema.validate(value, schemas[name], cls=jsonschema.Draft202012Validator)
            assert name in schemas or len(output) == 100
        preemptions += engine.scheduler.num_preemptions
    assert preemptions > 20
    assert finished > 2 * NUM_SCHEMAS * 0.95


def run_one(rules: TokenRules, prompt: bytes | list[int] = b"hi") -> tuple[list[int], FinishReason | None]:
    return answers(make_engine(100, 64, 2), [Request("r", [*prompt], rules)])["r"]


def test_the_end_comes_exactly_where_the_grammar_accepts() -> None:
    grammar = GRAMMARS.compile(StructuredOutputs(regex="(ab)*c?(ab)"))
    lengths = set()
    for seed in range(60):
        output, end = run_one(TokenRules(seed=seed, max_tokens=60, eos_token_ids=(EOS,), grammar=grammar))
        if end is FinishReason.STOP:
            assert text_of(output).endswith("ab")
            assert set(text_of(output)) <= set("abc")
            lengths.add(len(output))
    assert len(lengths) > 2


def test_a_complete_text_ends_without_an_end_token_and_before_min_tokens() -> None:
    grammar = GRAMMARS.compile(StructuredOutputs(choice=["yes"]))
    for rules in (TokenRules(), TokenRules(min_tokens=10), TokenRules(eos_token_ids=(EOS,)), TokenRules(max_tokens=3)):
        output, end = run_one(TokenRules(**{**{n: getattr(rules, n) for n in ("min_tokens", "eos_token_ids")},
                                            "max_tokens": max(rules.max_tokens, 3), "grammar": grammar}))  # fmt: skip
        assert (output, end) == ([*b"yes"], FinishReason.STOP)


def test_a_grammar_waits_for_the_end_of_thinking() -> None:
    grammar = GRAMMARS.compile(StructuredOutputs(choice=["yes", "no"]))
    thought = 0
    for seed in range(8):
        rules = TokenRules(seed=seed, max_tokens=700, eos_token_ids=(EOS,), grammar=grammar, grammar_after=(60,))
        output, end = run_one(rules)
        if end is FinishReason.STOP:
            thought += output.index(60)
            assert text_of(output[output.index(60) + 1 :]) in ("yes", "no")
    assert thought > 20


def test_a_grammar_begins_once_a_used_budget_has_closed_the_thinking() -> None:
    grammar = GRAMMARS.compile(StructuredOutputs(choice=["yes", "no"]))
    budget = ThinkingBudget(limit=3, start=(START,), end=(END,), close=(10, END, 10))
    for seed in range(5):
        rules = TokenRules(seed=seed, max_tokens=30, eos_token_ids=(EOS,), grammar=grammar, grammar_after=(END,),
                           thinking=budget)  # fmt: skip
        output, end = run_one(rules, [*b"hi", START])
        assert END not in output[:3]
        assert output[3:6] == [10, END, 10]
        assert (text_of(output[6:]) in ("yes", "no"), end) == (True, FinishReason.STOP)


def test_only_an_output_that_opens_a_thinking_part_has_one() -> None:
    grammar = GRAMMARS.compile(StructuredOutputs(choice=["yes", "no"]))
    opened = set()
    for seed in range(40):
        rules = TokenRules(seed=seed, temperature=2.0, max_tokens=700, eos_token_ids=(EOS,), grammar=grammar,
                           grammar_after=(60,), grammar_opener=7)  # fmt: skip
        output, end = run_one(rules)
        opened.add(output[0] == 7)
        if output[0] != 7:
            assert (text_of(output) in ("yes", "no"), end) == (True, FinishReason.STOP)
    assert opened == {True, False}
