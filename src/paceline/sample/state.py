"""How each running sequence chooses its tokens, as arrays indexed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.sample.edits import SequenceEdits, changes_logits
from paceline.sample.grammar import Grammars, SequenceGrammar
from paceline.sample.logprobs import LogprobsForm, logprobs_form, reports_logits
from paceline.tensors import FloatArray, IntArray
from paceline.types import TokenRules

_UINT64 = 2**64 - 1


class SamplerState:
    """The sampling rules of S slots, and what their edits remember of the committed tokens.

    Every field of a slot is written at :meth:`start`, whatever its last owner left. Nothing here depends on steps,
    rows or other slots: a sequence that starts again with its earlier output is in the very state it was in.

    Attributes:
        vocab_size: ids that can be chosen: the tokenizer's number of ids, or the head's where that is smaller.
        temperature, top_p, min_p: [S] float32.
        top_k: [S] int32.
        seeds: [S] uint64.
        logprobs: [S], the log-probabilities wanted of the chosen tokens; None is off.
        prompt_as_logits: [S], whether those of the prompt are to be logits.
        likely_above: [S], the probability above which an early stop takes a token for likely; None is off.
        edits: [S], None where a sequence's rules leave the logits as they are.
        grammars: [S], None where a sequence has no grammar.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        """``grammars`` are needed by rules that have one."""
        self.vocab_size = vocab_size
        self._compiled = grammars
        self.temperature: FloatArray = np.zeros(max_num_seqs, np.float32)
        self.top_k: IntArray = np.zeros(max_num_seqs, np.int32)
        self.top_p: FloatArray = np.zeros(max_num_seqs, np.float32)
        self.min_p: FloatArray = np.zeros(max_num_seqs, np.float32)
        self.seeds: npt.NDArray[np.uint64] = np.zeros(max_num_seqs, np.uint64)
        self.logprobs: list[LogprobsForm | None] = [None] * max_num_seqs
        self.prompt_as_logits = [False] * max_num_seqs
        self.likely_above: list[float | None] = [None] * max_num_seqs
        self.edits: list[SequenceEdits | None] = [None] * max_num_seqs
        self.grammars: list[SequenceGrammar | None] = [None] * max_num_seqs
        for slot in range(max_num_seqs):
            self.release(slot)

    def start(self, slot: int, rules: TokenRules, tokens: Sequence[int], num_prompt: int) -> None:
        """A sequence takes the slot: ``tokens`` are its prompt of ``num_prompt`` tokens and its earlier output."""
        self.temperature[slot] = rules.temperature
        self.top_k[slot] = min(rules.top_k, self.vocab_size)
        self.top_p[slot] = rules.top_p
        self.min_p[slot] = rules.min_p
        self.seeds[slot] = rules.seed & _UINT64
        self.logprobs[slot] = logprobs_form(rules)
        self.prompt_as_logits[slot] = reports_logits(rules)
        self.likely_above[slot] = rules.early_stop_threshold if rules.early_stop_window else None
        edited = changes_logits(rules)
        self.edits[slot] = SequenceEdits(rules, tokens, num_prompt, self.vocab_size) if edited else None
        self.grammars[slot] = None
        if rules.grammar is not None:
            assert self._compiled is not None, "a sequence has a grammar, but there is nothing to compile it"
            self.grammars[slot] = SequenceGrammar(self._compiled, rules, tokens[num_prompt:], tokens[:num_prompt])

    def commit(self, slot: int, token: int) -> None:
        """The sequence in the slot grows by a chosen token."""
        edits = self.edits[slot]
        if edits is not None:
            edits.commit(token)
        grammar = self.grammars[slot]
        if grammar is not None:
            grammar.commit(token)

    def is_complete(self, slot: int) -> bool:
        """Whether nothing can follow the sequence's output by its grammar."""
        grammar = self.grammars[slot]
        return grammar is not None and grammar.complete

    def release(self, slot: int) -> None:
        """The slot's sequence is gone: the slot is that of a sequence without rules and tokens."""
        self.start(slot, TokenRules(), (), 0)
