"""The engine property: in any company, a request's tokens and log-probability bits are those of its solo run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from paceline import _native
from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, SchedulerLimits
from paceline.engine.engine import Engine
from paceline.models.decoder import Decoder
from paceline.ops.api import Ops
from paceline.ops.cpu import CpuOps
from paceline.ops.reference import ReferenceOps
from paceline.runner.runner import ModelRunner
from paceline.sample.grammar import Grammars, Vocabulary
from paceline.structured_outputs import StructuredOutputs
from paceline.types import REPETITION, FinishReason, LogprobsMode, ThinkingBudget, TokenEvent, TokenLogprobs, TokenRules
from support import sampling_oracle as oracle
from support.random_model import CONTEXT, VOCAB_SIZE, random_adapters, random_model

TOKENIZER_SIZE = VOCAB_SIZE - 3
"""The head is wider than the tokenizer, as in real models."""
CHARACTERS = [*b'{}[]":, \n-.0123456789abcdefghijklmnopqrstuvwxyz', *b"ABCDEFG/<>"]
WORDS = [bytes([character]) for character in CHARACTERS]
TOKENS = [*WORDS, *[b"" for _ in range(TOKENIZER_SIZE - len(WORDS) - 3)], b'":', b"true", b"ab"]
"""What the tokens are to grammars: single characters, nothing, and a few longer pieces."""
STRUCTURES = [
    StructuredOutputs(json={"type": "array", "items": {"enum": [1, True, "ab"]}, "minItems": 2}),
    StructuredOutputs(json={"type": "object", "additionalProperties": {"type": "integer"}}, whitespace_pattern=" "),
    StructuredOutputs(json_object=True, disable_any_whitespace=True),
    StructuredOutputs(regex="[a-f]{3,20}(ab|ba)+"),
    StructuredOutputs(choice=["ab", "abc", "cab", "true", "x y z"]),
    StructuredOutputs(grammar='root ::= "(" root ")" | "<" root ">" | [a-c]+'),
    StructuredOutputs(structural_tag={"structures": [{"begin": "a<", "schema": {"type": "integer"}, "end": ">"}],
                                      "triggers": ["a<"]}),
]  # fmt: skip


def grammars_of_tokens() -> Grammars:
    def encode(data: bytes) -> list[int]:
        return [WORDS.index(bytes([byte])) for byte in data if bytes([byte]) in WORDS]

    return Grammars(lambda: Vocabulary(TOKENS, frozenset(), encode))


@dataclass(frozen=True)
class Loaded:
    """A model and the operations that it was packed for."""

    ops: Ops
    model: Decoder


@dataclass
class Answer:
    """Everything a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: tuple[FinishReason, int | str | None] | None = None

    def take(self, event: TokenEvent) -> None:
        assert self.finish is None, "news of a request that has ended"
        assert event.error is None, event.error
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish = (event.finish_reason, event.stop_reason)


def load(ops: Ops) -> Loaded:
    return Loaded(ops, replace(random_model(ops), adapters=random_adapters(ops)))


def make_engine(
    loaded: Loaded, *, num_blocks: int, block_size: int, prefix_caching: bool, limits: SchedulerLimits
) -> Engine:
    runner = ModelRunner(
        loaded.model,
        loaded.ops,
        loaded.ops.make_kv(loaded.model.kv_layout, num_blocks, block_size),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocab_size=TOKENIZER_SIZE,
        grammars=grammars_of_tokens(),
    )
    manager = KvManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
    return Engine(Scheduler(limits, manager), runner)


def solo(alone: Loaded, request: Request) -> Answer:
    """One request, everything in one step, no cache."""
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=CONTEXT, max_model_len=CONTEXT)
    engine = make_engine(alone, num_blocks=CONTEXT // 16, block_size=16, prefix_caching=False, limits=limits)
    engine.add(copy_of(request))
    answer = Answer()
    while engine.has_work:
        for event in engine.step():
            answer.take(event)
    return answer


def copy_of(request: Request) -> Request:
    caching = request.cache_salt, request.adapter
    return Request(request.request_id, list(request.tokens), request.rules, request.priority, *caching)


def random_rules(rng: random.Random, num_prompt: int) -> TokenRules:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(TOKENIZER_SIZE), count)))

    max_tokens = min(rng.choice([1, 4, 12, 30, 45]), CONTEXT - num_prompt)
    rules = TokenRules(
        temperature=rng.choice([0.0, 0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 500]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3, 0.0]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.getrandbits(64),
        max_tokens=max_tokens,
        min_tokens=min(rng.choice([0, 0, 3]), max_tokens),
        eos_token_ids=ids(rng.choice([0, 0, 2])),
        stop_token_ids=ids(rng.choice([0, 0, 2])),
        logprobs=rng.choice([None, None, 0, 3, -1]),
        logprobs_mode=rng.choice(list(LogprobsMode)),
        temp_scaled_logprobs=rng.random() < 0.5,
        top_p_normalized_logprobs=rng.random() < 0.5,
    )
    if rng.random() < 0.4:
        rules = replace(
            rules,
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.5, -0.4]),
            presence_penalty=rng.choice([0.0, 0.7]),
        )
    if rng.random() < 0.3:
        rules = replace(
            rules,
            bad_words=tuple(tuple(rng.choices(range(TOKENIZER_SIZE), k=rng.choice([1, 2, 3]))) for _ in range(6)),
            logit_bias=tuple((i, rng.uniform(-9, 9)) for i in ids(4)),
            allowed_token_ids=ids(30) if rng.random() < 0.5 else None,
        )
    if rng.random() < 0.3:
        start, end = ids(rng.choice([1, 1, 2])), ids(rng.choice([1, 1, 3]))
        close = rng.choice([end, (*ids(1), *end, *ids(1))])
        limit = rng.choice([0, 1, 5, 20])
        eos = tuple(token for token in ids(8) if token not in (*end, *close))
        rules = replace(rules, thinking=ThinkingBudget(limit, start, end, close), eos_token_ids=eos)
    elif rng.random() < 0.3:
        rules = replace(
            rules,
            grammar=grammars_of_tokens().compile(rng.choice(STRUCTURES)),
            grammar_after=(after := rng.choice([(), (), (5,), (7, 8)])),
            grammar_opener=rng.choice([None, 3]) if after else None,
            # Together with these a grammar would often leave nothing to choose; the end token is no text to it.
            bad_words=(),
            allowed_token_ids=None,
            eos_token_ids=rng.choice([(), (len(WORDS),)]),
            stop_token_ids=(),
        )
    if rng.random() < 0.3:
        window, threshold = rng.choice([(1, 0.3), (2, 0.2), (4, 0.05), (9, 0.02)])
        rules = replace(rules, early_stop_window=window, early_stop_threshold=threshold)
    if rng.random() < 0.15:
        rules = replace(rules, prompt_logprobs=rng.choice([0, 2, -1]))
    return rules


def random_requests(rng: random.Random) -> list[Request]:
    """A few requests, many of them with a common beginning."""
    common = [rng.randrange(TOKENIZER_SIZE) for _ in range(40)]
    requests = []
    for number in range(rng.randint(2, 7)):
        shared = common[: rng.choice([0, 0, 7, 8, 16, 33])]
        own = [rng.randrange(TOKENIZER_SIZE) for _ in range(rng.choice([1, 2, 8, 15, 25]))]
        prompt = shared + own
        rules = random_rules(rng, len(prompt))
        if rules.thinking is not None and rng.random() < 0.7:
            prompt[-1:] = rules.thinking.start  # leaves the thinking open
            rules = replace(rules, max_tokens=min(rules.max_tokens, CONTEXT - len(prompt)))
        requests.append(
            Request(
                f"r{number}",
                prompt,
                rules,
                priority=rng.choice([0, 0, 1]),
                cache_salt=rng.choice(["", "", "other"]),
                adapter=rng.choice([None, None, "wide", "few"]),
            )
        )
    return requests


def check_scenario(company: Loaded, alone: Loaded, seed: str) -> int:
    """Run one scenario. Returns the number of preemptions, so that a test can tell that there were some."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    block_size = rng.choice([1, 4, 8, 16, 16, 32])
    most = max(len(r.tokens) + r.rules.max_tokens for r in requests)
    limits = SchedulerLimits(
        max_num_seqs=rng.choice([1, 3, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 7, 16, 64, 200]),
        max_model_len=CONTEXT,
        decode_blocks_ahead=rng.choice([0, 0, 1]),
        admission_age_limit=rng.choice([0, 2, 64]),
    )
    engine = make_engine(
        company,
        num_blocks=-(-most // block_size) + rng.choice([0, 0, 1, 2, 20]),
        block_size=block_size,
        prefix_caching=rng.random() < 0.8,
        limits=limits,
    )
    arrivals = {rng.randint(0, 12): [] for _ in requests}
    for request in requests:
        arrivals[rng.choice(list(arrivals))].append(request)
    aborts = {r.request_id: rng.randint(1, 25) for r in requests if rng.random() < 0.15}
    answers = {request.request_id: Answer() for request in requests}
    step = 0
    while arrivals or engine.has_work:
        for request in arrivals.pop(step, []):
            engine.add(copy_of(request))
        for request_id, when in aborts.items():
            if when == step:
                engine.abort(request_id)
        for event in engine.step():
            answers[event.request_id].take(event)
        step += 1
        assert step < 3000, "the engine does not come to an end"

    for request in requests:
        told, expected = answers[request.request_id], solo(alone, request)
        if told.finish == (FinishReason.ABORT, None):
            count = len(told.tokens)
            expected = Answer(
                expected.tokens[:count],
                expected.logprobs[: len(told.logprobs)],
                expected.prompt_logprobs[: len(told.prompt_logprobs)],
                told.finish,
            )
        assert told.tokens == oracle.as_thinking_allows(request.rules, request.tokens, told.tokens)
        assert told == expected, f"scenario {seed}, request {request.request_id}: {request.rules}"
    engine.scheduler.check_idle()
    return engine.scheduler.num_preemptions


def test_the_scenarios_bring_every_control_to_bear() -> None:
    ops = CpuOps(1)
    alone = load(ops)
    repeated = forced = adapted = 0
    for seed in range(30):
        for request in random_requests(random.Random(seed)):
            rules, answer = request.rules, solo(alone, request)
            plain = copy_of(request)
            plain.adapter = None
            adapted += solo(alone, plain) != answer
            repeated += answer.finish == (FinishReason.STOP, REPETITION)
            if rules.thinking is not None:
                histories = [answer.tokens[:count] for count in range(len(answer.tokens))]
                forced += any(oracle.thinking_at(rules.thinking, request.tokens, h)[1] is not None for h in histories)
    assert repeated > 10
    assert forced > 5
    assert adapted > 20


@dataclass(frozen=True)
class Case:
    """An implementation and a form of the weights. Each request's solo run is on one thread."""

    name: str
    make: Callable[[int], Ops]
    threads: int

    def load(self, threads: int) -> Loaded:
        ops = self.make(threads)
        return load(ops)

    def __str__(self) -> str:
        return f"{self.name}-{self.threads}"


CASES = [
    Case("reference", lambda _: ReferenceOps(), 1),
    *(
        Case(f"{isa}-{form or 'bf16'}", partial(CpuOps, isa=isa, quantization=form), threads)
        for isa in _native.levels()
        for form in (None, "int8", "int4")
        for threads in (1, 2, 5)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_answer_equals_its_solo_run(case: Case, num_scenarios: int) -> None:
    company, alone = case.load(case.threads), case.load(1)
    run = preempted = 0
    while run < num_scenarios or preempted < num_scenarios // 20:
        assert run < 10 * num_scenarios, "the scenarios hardly ever preempt"
        preempted += check_scenario(company, alone, f"{case}-{run}") > 0
        run += 1
