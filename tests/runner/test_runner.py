from __future__ import annotations

import numpy as np
import pytest

from paceline.models.decoder import Decoder
from paceline.ops.api import KvStore, LayerOps
from paceline.ops.reference import ReferenceOps
from paceline.runner.runner import ModelRunner
from paceline.tensors import Batch, FloatArray, KvLayout
from paceline.types import SeqSpan, SeqStart, StepPlan, TokenRules
from support.random_model import CONTEXT, VOCAB_SIZE, random_model

POISON = 13


class Treacherous:
    """A model that cannot stand one token: it raises, or gives logits that are not finite."""

    def __init__(self, model: Decoder, *, raises: bool) -> None:
        self.spec = model.spec
        self._model = model
        self._raises = raises

    @property
    def kv_layout(self) -> KvLayout:
        return self._model.kv_layout

    def with_ops(self, ops: LayerOps) -> Treacherous:
        return Treacherous(self._model.with_ops(ops), raises=self._raises)

    def forward(self, batch: Batch, kv: KvStore) -> FloatArray:
        bad = batch.token_ids == POISON
        if self._raises and bad.any():
            raise RuntimeError("a token this model cannot stand")
        hidden = self._model.forward(batch, kv)
        hidden[bad] = np.nan
        return hidden

    def logits(self, hidden: FloatArray) -> FloatArray:
        return self._model.logits(hidden)


def make_runner(model: Decoder | Treacherous, num_blocks: int = 64) -> ModelRunner:
    ops = ReferenceOps()
    kv = ops.make_kv(model.kv_layout, num_blocks, 4)
    return ModelRunner(model, ops, kv, max_num_seqs=4, max_model_len=CONTEXT, vocab_size=VOCAB_SIZE)


def start(slot: int, tokens: tuple[int, ...], rules: TokenRules | None = None) -> SeqStart:
    blocks = tuple(range(8 * slot, 8 * slot + -(-len(tokens) // 4)))
    return SeqStart(slot, tokens, len(tokens), 0, blocks, rules or TokenRules(temperature=0))


def plan_of(*starts: SeqStart) -> StepPlan:
    return StepPlan(1, start=starts, spans=tuple(SeqSpan(s.slot, 0, len(s.tokens)) for s in starts))


@pytest.mark.parametrize("raises", [True, False])
def test_a_failure_ends_only_the_sequence_that_causes_it(raises: bool) -> None:
    healthy = (start(0, (1, 2, 3)), start(2, (4, 5)))
    expected = make_runner(random_model(ReferenceOps())).execute(plan_of(*healthy)).seqs
    runner = make_runner(Treacherous(random_model(ReferenceOps()), raises=raises))
    first, bad, last = runner.execute(plan_of(healthy[0], start(1, (6, POISON)), healthy[1])).seqs
    assert (first, last) == expected
    assert bad.error is not None
    assert bad.tokens == ()


def test_sequences_go_on_after_a_neighbour_failed() -> None:
    alone, beside = (
        make_runner(random_model(ReferenceOps())),
        make_runner(Treacherous(random_model(ReferenceOps()), raises=True)),
    )
    alone.execute(plan_of(start(0, (1, 2, 3))))
    beside.execute(plan_of(start(0, (1, 2, 3)), start(1, (POISON,))))
    plan = StepPlan(2, release=(1,), spans=(SeqSpan(0, 3, 1),))
    assert beside.execute(plan) == alone.execute(StepPlan(2, spans=(SeqSpan(0, 3, 1),)))


def test_a_plan_without_spans_is_legal() -> None:
    runner = make_runner(random_model(ReferenceOps()))
    assert runner.execute(StepPlan(1)).seqs == ()
    assert runner.execute(StepPlan(2, start=(start(0, (1,)),))).seqs == ()
    assert runner.execute(StepPlan(3, release=(0,))).seqs == ()


def test_a_chunk_that_is_not_the_last_chooses_nothing() -> None:
    runner = make_runner(random_model(ReferenceOps()))
    whole = make_runner(random_model(ReferenceOps())).execute(plan_of(start(0, (1, 2, 3, 4)))).seqs[0]
    first = runner.execute(StepPlan(1, start=(start(0, (1, 2, 3, 4)),), spans=(SeqSpan(0, 0, 3, sample=False),)))
    assert first.seqs[0].tokens == ()
    assert runner.execute(StepPlan(2, spans=(SeqSpan(0, 3, 1),))).seqs[0] == whole


def test_prompt_logprobs_do_not_depend_on_the_chunks() -> None:
    tokens, rules = tuple(range(20, 32)), TokenRules(temperature=0, prompt_logprobs=3)
    whole = make_runner(random_model(ReferenceOps())).execute(plan_of(start(0, tokens, rules))).seqs[0]
    assert len(whole.prompt_logprobs) == len(tokens) - 1
    assert [entry.token_id for entry in whole.prompt_logprobs] == list(tokens[1:])
    runner = make_runner(random_model(ReferenceOps()))
    scores = []
    for step, (begin, count) in enumerate([(0, 5), (5, 1), (6, 6)]):
        starts = (start(0, tokens, rules),) if begin == 0 else ()
        span = SeqSpan(0, begin, count, sample=begin + count == len(tokens))
        scores += runner.execute(StepPlan(step, start=starts, spans=(span,))).seqs[0].prompt_logprobs
    assert tuple(scores) == whole.prompt_logprobs
