from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.engine.intake import accept
from paceline.engine.outputs import ChoiceDelta
from paceline.engine.text_side import RequestUpdate, TextSide
from paceline.sampling_params import SamplingParams
from paceline.types import FinishReason
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import END, EOS, small_engine

PROMPT = [1, 2, 3]


def answer(text: str | bytes | list[int], **params: Any) -> list[RequestUpdate]:
    """All updates of one request whose model says ``text``."""
    loaded = small_engine(ScriptedRunner(saying(len(PROMPT), text)))
    side = TextSide(loaded.info, loaded.engine.abort)
    settings = SamplingParams(**{"max_tokens": 60, "logprobs": 0, **params})
    intake = accept(loaded.info, PROMPT, settings, request_id="r", seed_source=random.Random(0))
    for request in intake.requests:
        loaded.engine.add(request)
    side.add(intake)
    updates = []
    while loaded.engine.has_work:
        updates += side.update(loaded.engine.step())
    assert side.open_choices("r") == []
    return updates


def deltas(text: str | bytes | list[int], **params: Any) -> list[ChoiceDelta]:
    return [update.delta for update in answer(text, **params)]


def joined(parts: list[ChoiceDelta]) -> tuple[str, list[int]]:
    return "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]


def test_end_of_sequence_adds_no_text_and_has_no_stop_reason() -> None:
    parts = deltas("hello")
    assert joined(parts) == ("hello", [*b"hello", EOS])
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (FinishReason.STOP, None)
    assert all(part.finish_reason is None for part in parts[:-1])


def test_the_last_of_max_tokens_is_a_real_token() -> None:
    parts = deltas("hello", max_tokens=3)
    assert joined(parts) == ("hel", [*b"hel"])
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (FinishReason.LENGTH, None)


def test_a_character_is_never_split() -> None:
    parts = deltas("a€😀b")
    assert [part.text for part in parts if part.text] == ["a", "€", "😀", "b"]
    assert joined(parts)[1] == [*"a€😀b".encode(), EOS]
    assert [len(part.token_ids) for part in parts if part.text] == [1, 3, 4, 1]


def test_an_unfinished_character_appears_at_the_end_only() -> None:
    assert joined(deltas("x€".encode()[:-1], max_tokens=3))[0] == "x\ufffd"


def test_a_stop_string_across_tokens_is_cut_and_named() -> None:
    parts = deltas("say STOP now", stop=["STOP"])
    assert joined(parts) == ("say ", [*b"say STOP"])
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (FinishReason.STOP, "STOP")
    assert not any("S" in part.text for part in parts)


def test_a_stop_string_can_be_kept() -> None:
    assert joined(deltas("say STOP now", stop="STOP", include_stop_str_in_output=True))[0] == "say STOP"


def test_what_looked_like_a_stop_string_is_released() -> None:
    parts = deltas("say STOMP", stop=["STOP"])
    assert joined(parts)[0] == "say STOMP"
    assert "STOM" in [part.text for part in parts]


def test_the_tokens_of_held_text_come_with_that_text() -> None:
    parts = deltas("say STOMP", stop=["STOP"])
    held = next(part for part in parts if part.text == "STOM")
    assert held.token_ids == tuple(b"STOM")
    assert [entry.token_id for entry in held.logprobs] == list(b"STOM")


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    parts = deltas("ab ab ab", stop=["ab"], min_tokens=4)
    assert joined(parts)[0] == "ab "
    assert joined(deltas("ab ab ab", stop=["ab"], min_tokens=5))[0] == "ab ab "


def test_a_stop_token_is_named_and_adds_no_text() -> None:
    parts = deltas("hello", stop_token_ids=[ord("l")])
    assert joined(parts) == ("he", [*b"hel"])
    assert parts[-1].stop_reason == ord("l")
    assert joined(deltas("hello", stop_token_ids=[ord("l")], include_stop_str_in_output=True))[0] == "hel"


def test_a_stop_string_that_names_a_control_token_stops_at_it() -> None:
    parts = deltas([*b"hi", END, *b"more"], stop=["<end>"])
    assert joined(parts) == ("hi", [*b"hi", END])
    assert parts[-1].stop_reason == "<end>"
    shown = deltas([*b"hi", END], stop=["<end>"], skip_special_tokens=False, include_stop_str_in_output=True)
    assert joined(shown)[0] == "hi<end>"


def test_control_tokens_are_left_out_unless_wanted() -> None:
    assert joined(deltas([*b"a", END, *b"b"]))[0] == "ab"
    assert joined(deltas([*b"a", END, *b"b"], skip_special_tokens=False))[0] == "a<end>b"


def test_ignore_eos_goes_on_to_the_limit() -> None:
    parts = deltas("hi", ignore_eos=True, max_tokens=6)
    assert joined(parts) == ("hi", [*b"hi", EOS, EOS, EOS, EOS])
    assert parts[-1].finish_reason is FinishReason.LENGTH


def test_choices_end_each_for_itself_and_the_last_one_says_so() -> None:
    updates = answer("hello", n=3)
    for index in range(3):
        assert joined([update.delta for update in updates if update.delta.index == index])[0] == "hello"
    assert [update.last for update in updates].count(True) == 1
    assert updates[-1].last


def test_there_are_no_empty_deltas_but_the_final_one() -> None:
    for part in deltas("a€b STO", stop=["STOP"])[:-1]:
        assert part.text


def test_prompt_logprobs_begin_with_none() -> None:
    updates = answer("a", prompt_logprobs=0)
    for update in updates:
        assert update.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in update.prompt_logprobs] == [None, 2, 3]


def test_scoring_alone_gives_one_delta_without_tokens() -> None:
    (update,) = answer("a", prompt_logprobs=0, max_tokens=0)
    assert (update.delta.text, update.delta.token_ids, update.delta.finish_reason) == ("", (), FinishReason.LENGTH)
    assert update.prompt_logprobs is not None
    assert len(update.prompt_logprobs) == 3


@pytest.mark.parametrize("seed", range(40))
def test_deltas_join_to_the_decoded_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "é", "€", "😀", "ST", "O", "P", " ", "\n"]) for _ in range(12))
    length = rng.randint(1, 40)
    parts = deltas(text, stop=["STOP", "OP\n", "é€"], max_tokens=length)
    whole = text.encode()[:length].decode(errors="replace")
    cuts = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in ("STOP", "OP\n", "é€") if stop in whole]
    expected = whole[: min(cuts)[1]] if cuts else whole
    assert joined(parts)[0] == expected
