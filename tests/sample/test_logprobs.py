from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paceline.ops.reference import ReferenceOps
from paceline.sample.logprobs import LOWEST, prompt_logprobs, token_logprobs
from paceline.tensors import FloatArray
from paceline.types import TokenLogprobs

OPS = ReferenceOps()


def one(logits: list[float], token: int, k: int, vocab_size: int) -> TokenLogprobs | None:
    row: FloatArray = np.array([logits], np.float32)
    [result] = token_logprobs(OPS, row, np.array([token], np.int32), k, vocab_size)
    return result


def test_padding_shares_the_probability_but_is_neither_listed_nor_ranked() -> None:
    logits = [0.0, 2.0, 1.0, 9.0, 1.0]
    total = math.log(sum(map(math.exp, logits)))
    for k, listed in ((0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 0)), (-1, (1, 2, 0)), (99, (1, 2, 0))):
        found = one(logits, 2, k, vocab_size=3)
        assert found is not None
        assert found.rank == 2
        assert found.logprob == pytest.approx(1 - total)
        assert found.top_ids == listed
        assert found.top_logprobs == pytest.approx([logits[i] - total for i in listed])


def test_the_chosen_token_carries_the_same_number_as_in_the_list() -> None:
    logits = np.random.default_rng(3).normal(0, 3, 500).tolist()
    for token in range(0, 500, 50):
        found = one(logits, token, -1, 500)
        assert found is not None
        assert found.top_logprobs[found.top_ids.index(token)] == found.logprob
        assert found.top_ids.index(token) == found.rank - 1


def test_every_number_can_be_written_as_json() -> None:
    found = one([0.0, -math.inf, -3e38, -20000.0, 3e4], 1, -1, 5)
    assert found is not None
    json.dumps([found.logprob, found.top_logprobs], allow_nan=False)
    assert found.logprob == LOWEST
    assert found.top_logprobs == (0.0, LOWEST, LOWEST, LOWEST, LOWEST)
    assert found.top_ids == (4, 0, 3, 2, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_none(bad: float) -> None:
    assert one([0.0, bad, 1.0], 0, 2, 3) is None


def test_prompt_tokens_are_scored_one_by_one() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (5, 40)).astype(np.float32)
    targets = np.array([3, 1, 39, 0, 3], np.int32)
    scores = prompt_logprobs(OPS, logits, targets, 2, 40)
    assert [score.token_id for score in scores] == targets.tolist()
    assert scores == [prompt_logprobs(OPS, logits[i : i + 1], targets[i : i + 1], 2, 40)[0] for i in range(5)]
    assert prompt_logprobs(OPS, logits[:0], targets[:0], 2, 40) == []


def test_a_prompt_row_that_is_not_finite_raises() -> None:
    logits = np.zeros((2, 4), np.float32)
    logits[1, 2] = math.nan
    with pytest.raises(ArithmeticError, match="not finite"):
        prompt_logprobs(OPS, logits, np.array([0, 0], np.int32), 1, 4)
