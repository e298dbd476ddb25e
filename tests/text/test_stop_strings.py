from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.stop_strings import StopStrings

texts = st.text("ab", max_size=20)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=3)


def first_stop(text: str, stops: list[str], counts_from: int) -> tuple[int, str] | None:
    """Where the first match ends that ends beyond ``counts_from``, and which it is. Written to be read."""
    for end in range(counts_from + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@settings(max_examples=400)
@given(texts, stop_lists, st.booleans(), st.integers(0, 10), st.data())
def test_any_division_into_pieces_gives_the_text_up_to_the_first_stop(
    text: str, stops: list[str], include: bool, counts_from: int, data: st.DataObject
) -> None:
    counts_from = min(counts_from, len(text))
    search = StopStrings(stops, include=include)
    released, position = "", 0
    while position < len(text):
        limit = counts_from if position < counts_from else len(text)
        end = data.draw(st.integers(position + 1, limit))
        released += search.push(text[position:end], counts=position >= counts_from)
        position = end
        if search.matched is None:
            # What is held back is the longest beginning of a stop string, and nothing more.
            held = text[len(released) : position]
            ends = (text[:position][-length:] for length in range(position, 0, -1))
            assert held == next((e for e in ends if any(s.startswith(e) and s != e for s in stops)), "")
    released += search.finish()
    expected = first_stop(text, stops, counts_from)
    if expected is None:
        assert (released, search.matched) == (text, None)
    else:
        end, stop = expected
        assert (released, search.matched) == (text[: end if include else end - len(stop)], stop)


def test_a_stop_string_across_pieces_never_leaks() -> None:
    search = StopStrings(["</answer>"])
    assert [search.push(piece) for piece in ("yes", " </", "ans", "wer", "> and more")] == ["yes", " ", "", "", ""]
    assert search.matched == "</answer>"
    assert search.push("more") == search.finish() == ""


def test_a_beginning_is_released_once_it_is_disproved() -> None:
    search = StopStrings(["</answer>"])
    assert search.push("a </ans") == "a "
    assert search.push("x") == "</ansx"
    assert search.push("</") == ""
    assert search.finish() == "</"


def test_a_match_may_begin_inside_a_failed_one() -> None:
    search = StopStrings(["aab"])
    assert search.push("aaab") == "a"
    assert search.matched == "aab"


@pytest.mark.parametrize(("include", "released"), [(False, "one"), (True, "one\n\n")])
def test_the_stop_string_is_cut_unless_it_is_included(include: bool, released: str) -> None:
    search = StopStrings(["\n\n"], include=include)
    assert search.push("one\n\ntwo") == released


def test_the_match_that_is_complete_first_wins_and_the_longest_of_equals() -> None:
    search = StopStrings(["abcde", "bcd"])
    assert search.push("xabcde") == "xa"
    assert search.matched == "bcd"
    search = StopStrings(["c", "abc"])
    assert search.push("xabc") == "x"
    assert search.matched == "abc"


def test_a_match_in_text_that_does_not_count_is_passed_over() -> None:
    search = StopStrings(["."])
    assert search.push("a.", counts=False) == "a."
    assert search.push("b.c") == "b"
    assert search.matched == "."


def test_a_match_may_share_text_with_one_that_does_not_count() -> None:
    search = StopStrings(["aa"])
    assert search.push("aa", counts=False) == "a"
    assert search.push("a") == ""
    assert search.matched == "aa"


def test_a_match_that_begins_too_early_but_ends_in_time_counts() -> None:
    search = StopStrings(["END"])
    assert search.push("x EN", counts=False) == "x "
    assert search.push("D y") == ""
    assert search.matched == "END"


def test_without_stop_strings_nothing_is_held_back() -> None:
    search = StopStrings([])
    assert search.push("anything") == "anything"
    assert search.finish() == ""
