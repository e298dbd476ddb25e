import pytest

from paceline.core.stop import Stop, find_stop
from paceline.types import FinishReason, TokenRules

EOS, CALLERS, BOTH, WORD = 1, 2, 3, 9


def end_of(token: int, num_output: int, num_tokens: int = 10, num_likely: int = 0, **rules: object) -> Stop | None:
    all_rules = {"max_tokens": 8, "eos_token_ids": (EOS, BOTH), "stop_token_ids": (CALLERS, BOTH), **rules}
    return find_stop(token, num_output, num_tokens, TokenRules(**all_rules), max_model_len=32, num_likely=num_likely)


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


def test_an_early_stop_needs_a_full_window_of_likely_tokens() -> None:
    rules = {"early_stop_window": 4, "max_tokens": 100}
    # The first likely token is number 5: the end is three tokens later.
    ends = [end_of(WORD, number, num_likely=max(number - 4, 0), **rules) for number in range(1, 9)]
    assert ends == [None] * 7 + [(FinishReason.STOP, "repetition", None)]
    assert end_of(WORD, 9, num_likely=9, max_tokens=100) is None


def test_an_early_stop_leaves_the_fewest_tokens_and_gives_way_to_an_end_token() -> None:
    rules = {"early_stop_window": 2, "max_tokens": 8}
    ends = [end_of(WORD, n, num_likely=n, min_tokens=4, **rules) is not None for n in range(1, 6)]
    assert ends == [False, False, False, True, True]
    assert end_of(CALLERS, 3, num_likely=3, **rules) == (FinishReason.STOP, CALLERS, None)
    assert end_of(WORD, 8, num_likely=8, **rules) == (FinishReason.STOP, "repetition", None)
