from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.tokenizer import Tokenizer
from support.tokenizer_gguf import byte_level_metadata, sentencepiece_metadata

KINDS = ["byte-level", "sentencepiece", "sentencepiece with spaces"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        metadata = byte_level_metadata()
    else:
        metadata = sentencepiece_metadata(add_space_prefix=kind.endswith("spaces"))
    return Tokenizer(read_gguf_tokenizer(metadata, Path("model.gguf")))


def single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    entries = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return {data: token for data, token in entries.items() if len(data) == 1}


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """Tokens without sense: any, single bytes of characters or of none, control tokens."""
    tokenizer = tokenizer_of(draw(st.sampled_from(KINDS)))
    byte_ids = single_bytes(tokenizer)
    spelt = st.text(min_size=1, max_size=3).map(lambda text: text.encode()) | st.binary(min_size=1, max_size=4)
    pieces = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token]),
        spelt.map(lambda data: [byte_ids[bytes([byte])] for byte in data if bytes([byte]) in byte_ids]),
        st.sampled_from(sorted(tokenizer.special_ids)).map(lambda token: [token]),
    )
    return tokenizer, [token for piece in draw(st.lists(pieces, max_size=12)) for token in piece]


@given(sequences(), st.booleans(), st.data())
def test_pushes_and_finish_join_to_the_text_of_the_whole(
    case: tuple[Tokenizer, list[int]], skip_special: bool, data: st.DataObject
) -> None:
    tokenizer, tokens = case
    shown = [t for t in tokens if not (skip_special and t in tokenizer.special_ids)]
    raw = b"".join(map(tokenizer.token_bytes, shown))
    if tokenizer is tokenizer_of("sentencepiece with spaces"):
        raw = raw.removeprefix(b" ")
    whole = raw.decode("utf-8", errors="replace")
    assert tokenizer.decode(tokens, skip_special=skip_special) == whole
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    text = ""
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        text += detokenizer.push(tokens[:count])
        tokens = tokens[count:]
    waiting = detokenizer.holds_back
    end = detokenizer.finish()
    assert waiting == bool(end)
    assert text + end == whole


@given(sequences(), sequences())
def test_a_continuation_is_what_the_whole_text_adds_to_the_prompt(
    prompt: tuple[Tokenizer, list[int]], output: tuple[Tokenizer, list[int]]
) -> None:
    tokenizer, before = prompt
    after = [token for token in output[1] if token < tokenizer.vocab_size]
    whole = tokenizer.detokenizer(skip_special=True)
    whole.push(before)
    added = whole.push(after) + whole.finish()
    for tail in (before, before[-12:]):
        detokenizer = tokenizer.detokenizer(skip_special=True, prompt_tail=tail)
        if tail is before or tokenizer.decode(tail, skip_special=True):
            assert detokenizer.push(after) + detokenizer.finish() == added


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_split_over_tokens_comes_whole(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    byte_ids = single_bytes(tokenizer)
    detokenizer = tokenizer.detokenizer(skip_special=True)
    texts = [detokenizer.push([byte_ids[bytes([byte])]]) for byte in "👍".encode()]
    assert texts == ["", "", "", "👍"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_may_still_become_a_character_is_held_back(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    byte_ids = {data[0]: token for data, token in single_bytes(tokenizer).items()}
    detokenizer = tokenizer.detokenizer(skip_special=True)
    assert detokenizer.push([byte_ids[0xF0], byte_ids[0x9F]]) == ""
    assert detokenizer.holds_back
    assert detokenizer.push([byte_ids[ord("a")]]) == "\ufffda"
    assert not detokenizer.holds_back
    assert detokenizer.push([byte_ids[0xC0]]) == "\ufffd"  # no character begins so
    assert detokenizer.push([byte_ids[0xE2]]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = tokenizer_of("byte-level")
    byte_ids = single_bytes(tokenizer)
    thumb = [byte_ids[bytes([byte])] for byte in "👍".encode()]
    detokenizer = tokenizer.detokenizer(skip_special=True, prompt_tail=[1, 5, 6, *thumb[:2]])
    assert detokenizer.push(thumb[2:]) == "👍"


def test_the_space_before_the_first_word_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = tokenizer_of("sentencepiece with spaces")
    ids = tokenizer.encode("the end", add_special=True)
    assert tokenizer.decode(ids, skip_special=True) == "the end"
    assert tokenizer.decode(ids, skip_special=False) == "<s> the end"
    assert tokenizer.detokenizer(skip_special=True, prompt_tail=ids).push(ids[1:]) == " the end"
    assert tokenizer.detokenizer(skip_special=True, prompt_tail=[1]).push(ids[1:]) == "the end"


def test_control_tokens_have_text_only_if_asked_for() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("a<|im_end|>b", add_special=False)
    assert tokenizer.decode(ids, skip_special=True) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"
