"""A runner without weights that knows what every row of the store must hold: the shadow of the key-value store.

For each span it checks that the block table spells exactly the sequence's own prefix, and answers with a hash of that
prefix. It finds stale, doubly owned and overwritten blocks, and drives scheduler, engine and server tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.types import (
    FinishReason,
    SeqResult,
    SeqSpan,
    SeqStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenRules,
)

_MASK = 2**64 - 1
_EMPTY = 0x9E3779B97F4A7C15


class ShadowError(AssertionError):
    """The plan breaks a rule that a real runner relies on without checking it."""


@dataclass
class _Sequence:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int]
    rules: TokenRules
    adapter: str | None = None
    # prefixes[p] identifies tokens 0..p.
    prefixes: list[int] = field(default_factory=list)

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            parent = self.prefixes[-1] if self.prefixes else empty_prefix(self.adapter)
            self.prefixes.append(extend(parent, self.tokens[len(self.prefixes)]))
        return self.prefixes[position]


class FakeRunner:
    """Executes plans for ``max_num_seqs`` slots over a pretended store, raising ShadowError for a plan that is wrong.

    A sequence whose prompt holds ``error_token`` gets ``SeqResult.error`` instead of its first output token; one that
    holds ``crash_token`` makes :meth:`execute` raise.

    Attributes:
        num_steps, num_tokens: plans executed, and tokens computed by them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        *,
        max_num_batched_tokens: int | None = None,
        error_token: int | None = None,
        crash_token: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_tokens = 0
        self._budget = max_num_batched_tokens
        self._error_token = error_token
        self._crash_token = crash_token
        self._rows: list[int | None] = [None] * (num_blocks * block_size)
        self._holders: list[set[int]] = [set() for _ in range(num_blocks)]
        self._sequences: dict[int, _Sequence] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        slots = [span.slot for span in plan.spans]
        _check(len(set(slots)) == len(slots), f"a slot has two spans: {slots}")
        total = sum(span.count for span in plan.spans)
        _check(self._budget is None or total <= self._budget, f"{total} tokens exceed the budget of {self._budget}")
        for slot in plan.release:
            self._release(slot)
        for start in plan.start:
            self._start(start)
        # All writes happen before any read is checked, as in a forward pass.
        for span in plan.spans:
            self._write(span)
        for span in plan.spans:
            self._read(span)
        return StepResult(plan.step, tuple(self._answer(span) for span in plan.spans))

    # ---- slots and blocks

    def _release(self, slot: int) -> None:
        _check(slot in self._sequences, f"slot {slot} is released, but nobody has it")
        for block in self._sequences.pop(slot).blocks:
            self._holders[block].remove(slot)

    def _start(self, start: SeqStart) -> None:
        slot = start.slot
        _check(0 <= slot < self.max_num_seqs, f"slot {slot} does not exist")
        _check(slot not in self._sequences, f"slot {slot} is started, but somebody has it")
        _check(start.num_computed < len(start.tokens), "nothing is left to compute")
        _check(all(0 <= token < self.vocab_size for token in start.tokens), "a token is outside the vocabulary")
        sequence = _Sequence(list(start.tokens), start.num_prompt, start.num_computed, [], start.rules, start.adapter)
        self._sequences[slot] = sequence
        shared, rest = divmod(start.num_computed, self.block_size)
        _check(rest == 0, f"{start.num_computed} computed tokens are not a number of full blocks")
        for index, block in enumerate(start.blocks[:shared]):
            self._holders[block].add(slot)
            sequence.blocks.append(block)
            self._check_block(sequence, index, self.block_size)
        self._append_blocks(slot, start.blocks[shared:])

    def _append_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            _check(not self._holders[block], f"block {block} goes to slot {slot}, but {self._holders[block]} hold it")
            self._holders[block].add(slot)
            first = block * self.block_size
            # Whatever it held is forgotten: reading a row before writing it is an error.
            self._rows[first : first + self.block_size] = [None] * self.block_size
        self._sequences[slot].blocks.extend(blocks)

    # ---- spans

    def _write(self, span: SeqSpan) -> None:
        _check(span.slot in self._sequences, f"slot {span.slot} has a span, but nobody has the slot")
        sequence = self._sequences[span.slot]
        self._append_blocks(span.slot, span.new_blocks)
        end = span.start + span.count
        _check(span.count >= 1, "an empty span")
        _check(span.start == sequence.num_computed, f"span at {span.start}, computed are {sequence.num_computed}")
        _check(end <= len(sequence.tokens), f"span to {end}, but there are {len(sequence.tokens)} tokens")
        _check(end <= len(sequence.blocks) * self.block_size, f"span to {end} exceeds the blocks")
        wanted = end == len(sequence.tokens) and sequence.rules.max_tokens > 0
        _check(span.sample == wanted, f"sample is {span.sample} for a span to {end} of {len(sequence.tokens)}")
        for position in range(span.start, end):
            block = sequence.blocks[position // self.block_size]
            _check(
                self._holders[block] == {span.slot}, f"block {block} is written while {self._holders[block]} hold it"
            )
            self._rows[block * self.block_size + position % self.block_size] = sequence.prefix(position)
        sequence.num_computed = end
        self.num_tokens += span.count

    def _read(self, span: SeqSpan) -> None:
        sequence = self._sequences[span.slot]
        for index in range(-(-sequence.num_computed // self.block_size)):
            rows = min(sequence.num_computed - index * self.block_size, self.block_size)
            self._check_block(sequence, index, rows)

    def _check_block(self, sequence: _Sequence, index: int, rows: int) -> None:
        block, first = sequence.blocks[index], index * self.block_size
        sequence.prefix(first + rows - 1)
        held = self._rows[block * self.block_size : block * self.block_size + rows]
        _check(
            held == sequence.prefixes[first : first + rows],
            f"block {block} does not hold tokens {first}..{first + rows - 1} of the sequence",
        )

    def _answer(self, span: SeqSpan) -> SeqResult:
        sequence = self._sequences[span.slot]
        tokens, rules, end = sequence.tokens, sequence.rules, span.start + span.count
        _check(self._crash_token not in tokens, "the sequence holds the crash token")
        scores: tuple[TokenLogprobs, ...] = ()
        if rules.prompt_logprobs is not None:
            last = min(end, sequence.num_prompt - 1)
            scores = tuple(
                token_logprobs(sequence.prefix(p), tokens[p + 1], rules.prompt_logprobs, self.vocab_size)
                for p in range(span.start, last)
            )
        if not span.sample:
            return SeqResult(span.slot, prompt_logprobs=scores)
        if self._error_token in tokens[: sequence.num_prompt]:
            return SeqResult(span.slot, error="the sequence holds the error token")
        prefix = sequence.prefix(end - 1)
        token = choose(prefix, rules, end - sequence.num_prompt, self.vocab_size)
        tokens.append(token)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if rules.logprobs is not None:
            logprobs = (token_logprobs(prefix, token, rules.logprobs, self.vocab_size),)
        likely = (is_likely(prefix, token, rules),) if rules.early_stop_window else ()
        return SeqResult(span.slot, (token,), logprobs, scores, likely=likely)


# ---- the pretended model, as pure functions


def empty_prefix(adapter: str | None) -> int:
    """What prefixes of nothing are: with another adapter everything that is computed is different."""
    prefix = _EMPTY
    for byte in b"" if adapter is None else adapter.encode():
        prefix = extend(prefix, byte)
    return prefix


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one token more (the finaliser of splitmix64)."""
    x = (prefix * 31 + token + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choose(prefix: int, rules: TokenRules, num_output: int, vocab_size: int) -> int:
    """The token after a prefix: a hash of prefix and seed, moved on past end tokens while those are masked."""
    token = extend(prefix, rules.seed) % vocab_size
    if num_output < rules.min_tokens:
        masked = {*rules.eos_token_ids, *rules.stop_token_ids}
        while token in masked:
            token = (token + 1) % vocab_size
    return token


def is_likely(prefix: int, token: int, rules: TokenRules) -> bool:
    """Whether the token's pretended probability is above the early stop's threshold."""
    return extend(prefix, token + 1) % 1024 / 1024 > rules.early_stop_threshold


def token_logprobs(prefix: int, token: int, k: int, vocab_size: int) -> TokenLogprobs:
    """Made-up numbers that depend on prefix and token alone."""
    top = vocab_size if k == -1 else k
    ids = tuple((prefix + i) % vocab_size for i in range(top))
    return TokenLogprobs(
        token_id=token,
        logprob=-(extend(prefix, token) % 4096) / 256,
        rank=1 + extend(prefix, token) % vocab_size,
        top_ids=ids,
        top_logprobs=tuple(-(i + prefix % 16) / 16 for i in range(top)),
    )


@dataclass(frozen=True)
class SoloAnswer:
    """What a request must get in whatever company it runs."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


def solo_answer(
    prompt: Sequence[int],
    rules: TokenRules,
    *,
    vocab_size: int,
    max_model_len: int,
    max_stored_tokens: int,
    adapter: str | None = None,
) -> SoloAnswer:
    """The answer of the pretended model, from its definition: no scheduler, no blocks.

    ``max_stored_tokens`` is the capacity of the whole store: a sequence that has more tokens to compute ends in error.
    """
    tokens, prefix = list(prompt), empty_prefix(adapter)
    scores: list[TokenLogprobs] = []
    for position, token in enumerate(prompt):
        if position and rules.prompt_logprobs is not None:
            scores.append(token_logprobs(prefix, token, rules.prompt_logprobs, vocab_size))
        prefix = extend(prefix, token)
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    likely: list[bool] = []
    reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | str | None = None
    while len(output) < rules.max_tokens and len(tokens) < max_model_len:
        if len(tokens) > max_stored_tokens:
            reason = FinishReason.ERROR
            break
        token = choose(prefix, rules, len(output), vocab_size)
        if rules.logprobs is not None:
            logprobs.append(token_logprobs(prefix, token, rules.logprobs, vocab_size))
        output.append(token)
        tokens.append(token)
        likely.append(is_likely(prefix, token, rules))
        prefix = extend(prefix, token)
        if len(output) > rules.min_tokens and token in (*rules.stop_token_ids, *rules.eos_token_ids):
            reason = FinishReason.STOP
            stop_reason = token if token in rules.stop_token_ids else None
            break
        window = rules.early_stop_window
        if 0 < window <= len(output) >= rules.min_tokens and all(likely[-window:]):
            reason, stop_reason = FinishReason.STOP, "repetition"
            break
    return SoloAnswer(tuple(output), tuple(logprobs), tuple(scores), reason, stop_reason)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ShadowError(message)
