import pytest

from paceline.core.stop import Stop, find_stop
from paceline.types import FinishReason, TokenRules

EOS, CALLERS, BOTH, WORD = 1, 2, 3, 9


def end_of(token: int, num_output: int, num_tokens: int = 10, **rules: object) -> Stop | None:
    all_rules = {"max_tokens": 8, "eos_token_ids": (EOS, BOTH), "stop_token_ids": (CALLERS, BOTH), **rules}
    return find_stop(token, num_output, num_tokens, TokenRules(**all_rules), max_model_len=32)


def test_an_ordinary_token_ends_nothing() -> None:
    assert end_of(WORD, 1) is None


def test_end_of_sequence_has_no_stop_reason() -> None:
    assert end_of(EOS, 1) == (FinishReason.STOP, None, None)


def test_a_stop_id_of_the_caller_is_reported() -> None:
    assert end_of(CALLERS, 1) == (FinishReason.STOP, CALLERS, None)


def test_an_id_that_is_both_is_reported_as_the_callers() -> None:
    assert end_of(BOTH, 1) == (FinishReason.STOP, BOTH, None)


@pytest.mark.parametrize("token", [EOS, CALLERS])
def test_end_tokens_count_only_beyond_min_tokens(token: int) -> None:
    assert [end_of(token, n, min_tokens=3) is None for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_the_last_allowed_token_ends_with_length_and_stays() -> None:
    assert end_of(WORD, 7) is None
    assert end_of(WORD, 8) == (FinishReason.LENGTH, None, None)


def test_an_end_token_in_the_last_allowed_place_is_a_stop() -> None:
    assert end_of(CALLERS, 8) == (FinishReason.STOP, CALLERS, None)


def test_a_full_context_ends_with_length() -> None:
    assert end_of(WORD, 1, num_tokens=31) is None
    assert end_of(WORD, 1, num_tokens=32) == (FinishReason.LENGTH, None, None)
