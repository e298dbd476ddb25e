"""What a sequence's rules and history change in its logits, and how a step's rows are gathered for one operation.

All of it is a function of the rules and the committed tokens. Sequences whose rules change nothing have no
:class:`SequenceEdits` at all and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.sample.history import TokenCounts
from paceline.sample.thinking import SequenceThinking
from paceline.tensors import FloatArray, IntArray, LogitEdits
from paceline.types import TokenRules

_FLOAT32 = np.finfo(np.float32)


def changes_logits(rules: TokenRules) -> bool:
    return (
        counts_tokens(rules)
        or rules.min_tokens > 0
        or bool(rules.bad_words)
        or bool(rules.logit_bias)
        or rules.allowed_token_ids is not None
        or rules.thinking is not None
    )


def counts_tokens(rules: TokenRules) -> bool:
    return rules.repetition_penalty != 1 or rules.frequency_penalty != 0 or rules.presence_penalty != 0


class SequenceEdits:
    """The edits of one sequence. Ids that cannot be chosen anyway, at or above ``vocab_size``, are left out of them.

    Attributes:
        allowed_bits: [ceil(vocab_size / 32)] uint32, or None if every id is allowed.
        bias_ids, bias_values: int32 and float32, one entry for each biased id.
        counts: the tokens that penalties look at, or None if there are no penalties. The prompt's matter to the
            repetition penalty alone, so without it they are not collected.
        repetition, frequency, presence: the strengths of the penalties.
        thinking: where the sequence stands in its thinking, or None if that has no budget.
    """

    def __init__(self, rules: TokenRules, tokens: Sequence[int], num_prompt: int, vocab_size: int) -> None:
        bias = {token: value for token, value in rules.logit_bias if token < vocab_size}
        self.allowed_bits: npt.NDArray[np.uint32] | None = None
        if rules.allowed_token_ids is not None:
            self.allowed_bits = _bits(rules.allowed_token_ids, vocab_size)
        self.bias_ids: IntArray = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values: FloatArray = np.fromiter(bias.values(), np.float32, len(bias))
        self._output = list(tokens[num_prompt:])
        self.counts: TokenCounts | None = None
        # A float32 that is zero or infinite would turn ordinary logits into NaN.
        self.repetition = min(max(rules.repetition_penalty, float(_FLOAT32.tiny)), float(_FLOAT32.max))
        self.frequency = rules.frequency_penalty
        self.presence = rules.presence_penalty
        if counts_tokens(rules):
            prompt = tokens[:num_prompt] if rules.repetition_penalty != 1 else ()
            self.counts = TokenCounts(prompt, self._output)

        self.thinking: SequenceThinking | None = None
        self._eos_token_ids = frozenset(rules.eos_token_ids)
        if rules.thinking is not None:
            self.thinking = SequenceThinking(rules.thinking, tokens, num_prompt)

        words = [word for word in rules.bad_words if word and word[-1] < vocab_size]
        always = {word[-1] for word in words if len(word) == 1}
        ends = {token for token in rules.eos_token_ids + rules.stop_token_ids if token < vocab_size}
        self._min_tokens = rules.min_tokens
        self._banned = _ids(always)
        self._banned_before_min = _ids(always | ends)
        self._words_after: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._words_after.setdefault(word[-2], []).append(word)

    def commit(self, token: int) -> None:
        """The output grows by ``token``."""
        self._output.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.thinking is not None:
            self.thinking.commit(token)

    def forced(self) -> int | None:
        """The token that has to come next; then the other edits have no say. None if there is a choice."""
        return None if self.thinking is None else self.thinking.forced()

    def settle(self, token: int) -> int:
        """What stands in the place of a chosen token."""
        return token if self.thinking is None else self.thinking.settle(token, self._eos_token_ids)

    def banned(self) -> IntArray:
        """Ids, int32 and each once, that the next token must not be.

        Those are end tokens before ``min_tokens``, bad words of one token, and the last token of a longer bad word
        when the output ends with all of the word's tokens before it.
        """
        banned = self._banned_before_min if len(self._output) < self._min_tokens else self._banned
        if not self._output:
            return banned
        words = self._words_after.get(self._output[-1], ())
        completed = {word[-1] for word in words if tuple(self._output[1 - len(word) :]) == word[:-1]}
        return _ids(completed.union(banned.tolist())) if completed else banned


def build_edits(sequences: Sequence[SequenceEdits | None], width: int, vocab_size: int) -> LogitEdits | None:
    """Gather R rows' edits of logits [R, ``width``]; None if they change nothing."""
    num_rows = len(sequences)
    active = [(row, sequence) for row, sequence in enumerate(sequences) if sequence is not None]
    if not active and width <= vocab_size:
        return None
    forced = [(row, token) for row, seq in active if (token := seq.forced()) is not None]
    allowed = [(row, _bits((token,), vocab_size)) for row, token in forced]
    if forced:
        rows = {row for row, _ in forced}
        active = [(row, seq) for row, seq in active if row not in rows]
    allowed += [(row, seq.allowed_bits) for row, seq in active if seq.allowed_bits is not None]
    allowed_bits = np.zeros((len(allowed), -(-width // 32)), np.uint32)
    for i, (_, bits) in enumerate(allowed):
        allowed_bits[i, : len(bits)] = bits
    bias = [(row, seq.bias_ids) for row, seq in active]
    seen = [(row, seq.counts) for row, seq in active if seq.counts is not None]
    banned = [(row, seq.banned()) for row, seq in active]
    repetition, frequency, presence = np.zeros((3, num_rows), np.float32)
    for row, seq in active:
        repetition[row], frequency[row], presence[row] = seq.repetition, seq.frequency, seq.presence
    return LogitEdits(
        vocab_size=vocab_size,
        allowed_rows=np.array([row for row, _ in allowed], np.int32),
        allowed_bits=allowed_bits,
        bias_starts=_starts(num_rows, bias),
        bias_ids=_join([ids for _, ids in bias]),
        bias_values=_join([seq.bias_values for _, seq in active], np.float32),
        seen_starts=_starts(num_rows, [(row, counts.ids) for row, counts in seen]),
        seen_ids=_join([counts.ids for _, counts in seen]),
        seen_counts=_join([counts.counts for _, counts in seen]),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        banned_starts=_starts(num_rows, banned),
        banned_ids=_join([ids for _, ids in banned]),
    )


def _bits(allowed: Sequence[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Bit i % 32 of word i // 32 is set for each allowed id i."""
    mask = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    ids = np.array(allowed, np.int64)
    mask[ids[ids < vocab_size]] = True
    return np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32)


def _ids(tokens: set[int]) -> IntArray:
    return np.array(sorted(tokens), np.int32)


def _starts(num_rows: int, lists: Sequence[tuple[int, IntArray]]) -> IntArray:
    """[R + 1] int32: where each row's list begins and ends when they are laid end to end."""
    starts = np.zeros(num_rows + 1, np.int32)
    for row, ids in lists:
        starts[row + 1] = len(ids)
    return np.cumsum(starts, dtype=np.int32) if lists else starts


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic] = np.int32) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
