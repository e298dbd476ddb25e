"""The model runner: takes a plan, runs the model over everyone's tokens at once, returns what each sequence got.

It never decides who runs, who stops or who gets which block: the scheduler does. It owns the slots, the key-value store
and the sampler's state, and nothing else knows them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.models.decoder import Model
from paceline.ops.api import KvStore, Ops
from paceline.runner.batch import PromptRows, build_batch, prompt_rows
from paceline.sample.grammar import Grammars
from paceline.sample.logprobs import prompt_logprobs
from paceline.sample.sampler import Pick, Sampler
from paceline.sample.state import SamplerState
from paceline.slots import Slots
from paceline.tensors import Batch, FloatArray
from paceline.types import SeqResult, SeqSpan, StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)

SCORED_ROWS_AT_ONCE = 32
"""Rows of prompt logits held in memory at a time: 32 rows of a vocabulary of 150,000 are 19 MB."""


class ModelRunner:
    """Runs one model. ``max_model_len`` and ``vocab_size`` (the tokenizer's) bound what the plans may bring.

    ``grammars`` are needed by sequences that have one.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: KvStore,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._forward = ops.capture(lambda to_call: model.with_ops(to_call).forward)
        self._model = model
        self._ops = ops
        self._kv = kv
        self._slots = Slots(max_num_seqs, max_model_len, kv.block_size)
        self._state = SamplerState(max_num_seqs, vocab_size, grammars)
        self._sampler = Sampler(ops, self._state)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        An exception in the model's or the sampler's work ends only the sequence that causes it: the step is then run
        again span by span. That is safe, for a failed step has committed nothing and what it wrote to the store is
        written again with the same values; and it is exact, for a span's result does not depend on its neighbours.
        """
        for slot in plan.release:
            self._slots.release(slot)
            self._state.release(slot)
        for start in plan.start:
            self._slots.start(start)
            self._state.start(start.slot, start.rules, start.tokens, start.num_prompt)
        for span in plan.spans:
            if span.new_blocks:
                self._slots.append_blocks(span.slot, span.new_blocks)
        if not plan.spans:
            return StepResult(plan.step)
        try:
            results = self._run(plan.spans)
        except Exception:
            logger.exception("step %d failed; running its %d sequences one by one", plan.step, len(plan.spans))
            results = [self._run_fenced(span) for span in plan.spans]
        return StepResult(plan.step, tuple(results))

    def _run_fenced(self, span: SeqSpan) -> SeqResult:
        try:
            return self._run([span])[0]
        except Exception as error:
            logger.exception("the sequence in slot %d cannot go on", span.slot)
            return SeqResult(span.slot, error=f"the model could not be run on this request: {error}")

    def _run(self, spans: Sequence[SeqSpan]) -> list[SeqResult]:
        batch = build_batch(spans, self._slots)
        hidden = self._forward(batch, self._kv)
        picks = self._choose(spans, batch, hidden)
        scores = {
            wanted.span: self._score(wanted, hidden, as_logits=self._state.prompt_as_logits[spans[wanted.span].slot])
            for wanted in prompt_rows(spans, self._slots, batch)
        }
        return [self._commit(span, picks.get(span.slot), scores.get(i, ())) for i, span in enumerate(spans)]

    def _choose(self, spans: Sequence[SeqSpan], batch: Batch, hidden: FloatArray) -> dict[int, Pick]:
        """The next token of each span that samples, by slot."""
        sampling = [span for span in spans if span.sample]
        if not sampling:
            return {}
        logits = self._model.logits(self._ops.take_rows(hidden, batch.logit_rows))
        slots = [span.slot for span in sampling]
        picks = self._sampler.sample(logits, slots, [span.start + span.count for span in sampling])
        return dict(zip(slots, picks, strict=True))

    def _score(self, wanted: PromptRows, hidden: FloatArray, *, as_logits: bool) -> tuple[TokenLogprobs, ...]:
        scores: list[TokenLogprobs] = []
        for first in range(0, len(wanted.rows), SCORED_ROWS_AT_ONCE):
            part = slice(first, first + SCORED_ROWS_AT_ONCE)
            logits = self._model.logits(self._ops.take_rows(hidden, wanted.rows[part]))
            scores += prompt_logprobs(
                self._ops, logits, wanted.targets[part], wanted.k, self._state.vocab_size, as_logits=as_logits
            )
        return tuple(scores)

    def _commit(self, span: SeqSpan, pick: Pick | None, scores: tuple[TokenLogprobs, ...]) -> SeqResult:
        if pick is not None and pick.token is None:
            return SeqResult(span.slot, error=pick.error)
        self._slots.num_computed[span.slot] = span.start + span.count
        if pick is None or pick.token is None:
            return SeqResult(span.slot, prompt_logprobs=scores)
        self._slots.append_token(span.slot, pick.token)
        self._state.commit(span.slot, pick.token)
        logprobs = () if pick.logprobs is None else (pick.logprobs,)
        likely = () if pick.likely is None else (pick.likely,)
        complete = self._state.is_complete(span.slot)
        return SeqResult(span.slot, (pick.token,), logprobs, scores, complete=complete, likely=likely)
