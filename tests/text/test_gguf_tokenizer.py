from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.pretokenizers import PRE_TOKENIZERS
from paceline.text.tokenizer import Tokenizer
from support.llamacpp import LlamaCpp
from support.text_corpus import TEXTS, random_texts
from support.tokenizer_gguf import (
    BLANKS,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
    write_model,
)

SOURCE = Path("model.gguf")
DISTINCT = list({pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}.values())
"""One name for each different way to cut words."""


def read(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(read_gguf_tokenizer(metadata, SOURCE))


def comparable(name: str, text: str) -> bool:
    """Whether llama.cpp follows the model's own expressions in a text: some it only approximates."""
    if name in ("tekken", "gpt-4o"):
        return not any(unicodedata.category(character).startswith("M") for character in text)
    return name != "deepseek-coder" or "\u2009" not in text


@pytest.mark.parametrize("name", DISTINCT)
def test_byte_level_vocabularies_are_read_as_llama_cpp_reads_them(name: str, tmp_path: Path) -> None:
    metadata = byte_level_metadata(name)
    oracle = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    tokenizer = read(metadata)
    for text in TEXTS + random_texts(60, seed=3):
        if comparable(name, text):
            ids = tokenizer.encode(text, add_special=True)
            assert ids == oracle.tokenize(text, add_special=True), text
            assert tokenizer.decode(ids, skip_special=True) == text


@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_sentencepiece_vocabularies_are_read_as_llama_cpp_reads_them(add_space_prefix: bool, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=add_space_prefix)
    oracle = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    tokenizer = read(metadata)
    for text in [*TEXTS, *random_texts(100, seed=4), "a<s>b</s> c <s> <s>", "x\n\n\n</s>\n\ny"]:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special=True, parse_special=parse_special)
            assert ids == oracle.tokenize(text, add_special=True, parse_special=parse_special), text


def test_a_text_comes_back_from_its_tokens() -> None:
    for add_space_prefix in (False, True):
        tokenizer = read(sentencepiece_metadata(add_space_prefix=add_space_prefix))
        for text in TEXTS + random_texts(100, seed=5):
            if add_space_prefix and any(blank in text for blank in BLANKS):
                continue  # a space is put after a token defined by the user, as before every text
            ids = tokenizer.encode(text, add_special=True, parse_special=False)
            # The character that stands for a space cannot be told from one.
            assert tokenizer.decode(ids, skip_special=True) == text.replace("▁", " ")


def test_tokens_that_only_pad_the_table_are_no_tokens() -> None:
    metadata = byte_level_metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, UNUSED]
    tokenizer = read(metadata)
    assert tokenizer.vocab_size == size
    assert tokenizer.token_bytes(size) == b""


def test_control_tokens_are_special_and_tokens_defined_by_the_user_are_not() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<tool>", "<|extra|>"]
    metadata["tokenizer.ggml.token_type"] += [USER_DEFINED, CONTROL]
    tokenizer = read(metadata)
    tool, extra = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.special_ids == {0, 1, 2, extra}
    for parse_special in (False, True):
        assert tool in tokenizer.encode("a<tool>b", add_special=False, parse_special=parse_special)
    assert extra in tokenizer.encode("a<|extra|>b", add_special=False)
    assert extra not in tokenizer.encode("a<|extra|>b", add_special=False, parse_special=False)
    assert tokenizer.decode([tool, extra], skip_special=True) == "<tool>"
    assert tokenizer.decode([tool, extra], skip_special=False) == "<tool><|extra|>"


def test_ends_are_the_named_one_first_and_then_those_by_common_use() -> None:
    tokenizer = read(byte_level_metadata())
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|im_start|>"


def test_the_kind_and_the_pre_tokenizer_decide_about_bos_unless_the_file_does() -> None:
    assert not read(byte_level_metadata("gpt-2")).adds_bos
    assert read(byte_level_metadata("llama-bpe")).adds_bos
    assert not read({**byte_level_metadata("llama-bpe"), "tokenizer.ggml.add_bos_token": False}).adds_bos
    assert read(sentencepiece_metadata(add_space_prefix=True)).adds_bos
    with_eos = read({**byte_level_metadata(), "tokenizer.ggml.add_eos_token": True})
    assert with_eos.encode("a", add_special=True)[-1] == 2


def test_no_merge_leads_from_plain_text_to_a_control_token() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["[X]", "[X"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL, NORMAL]
    metadata["tokenizer.ggml.merges"] = ["[ X", "[X ]", *metadata["tokenizer.ggml.merges"]]
    tokenizer = read(metadata)
    control = tokenizer.vocab_size - 2
    assert tokenizer.encode("[X]", add_special=False) == [control]
    plain = tokenizer.encode("a[X]b", add_special=False, parse_special=False)
    assert control not in plain
    assert tokenizer.decode(plain, skip_special=True) == "a[X]b"


def test_a_word_of_the_vocabulary_that_is_a_control_token_stays_text() -> None:
    # Where whole words are looked up, merges do not stand between a text and a control token.
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["STOP"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL]
    tokenizer = read(metadata)
    plain = tokenizer.encode("STOP", add_special=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain, skip_special=True) == "STOP"


def test_words_of_the_vocabulary_are_taken_whole_where_the_pre_tokenizer_says_so() -> None:
    for name, whole in (("llama-bpe", True), ("gpt-2", False)):
        metadata = byte_level_metadata(name)
        metadata["tokenizer.ggml.tokens"] += ["Zqxj"]  # no merge leads to it
        metadata["tokenizer.ggml.token_type"] += [NORMAL]
        tokenizer = read(metadata)
        ids = tokenizer.encode("Zqxj", add_special=False)
        assert (ids == [tokenizer.vocab_size - 1]) == whole
        assert tokenizer.decode(ids, skip_special=True) == "Zqxj"


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: tokenizer\.ggml\.pre is 'nonsense'.*gpt-2.*tekken"):
        read(byte_level_metadata("nonsense"))


MISSING = object()


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model", MISSING, "is missing"),
        ("model", "bert", "not supported"),
        ("model", 7, "must be a string"),
        ("pre", ["gpt-2"], "must be a string"),
        ("tokens", MISSING, "is missing"),
        ("tokens", "abc", "list of strings"),
        ("tokens", [1, 2], "list of strings"),
        ("tokens", [], "is empty"),
        ("tokens", ["a", "b", "a"], "holds 'a' twice, as 0 and 2"),
        ("token_type", [1, 1], "has 2 entries"),
        ("token_type", [1.5] * 900, "list of integers"),
        ("merges", MISSING, "is missing"),
        ("merges", ["ab"], "'ab', which is not two tokens"),
        ("merges", ["a "], "not two tokens"),
        ("merges", ["a nowhere"], "do not fit the vocabulary"),
        ("bos_token_id", 900, "has ids 0 to 899"),
        ("bos_token_id", -1, "has ids 0 to 899"),
        ("eos_token_id", "2", "has ids 0 to 899"),
        ("eot_token_id", 10**12, "has ids 0 to 899"),
        ("add_bos_token", 1, "must be true or false"),
    ],
)
def test_malformed_byte_level_metadata_is_refused_by_key(key: str, value: Any, problem: str) -> None:
    metadata = byte_level_metadata()
    name = f"tokenizer.ggml.{key}"
    if key == "tokens":
        del metadata["tokenizer.ggml.token_type"]
    if value is MISSING:
        del metadata[name]
    else:
        metadata[name] = value
    with pytest.raises(CheckpointError) as raised:
        read(metadata)
    assert f"model.gguf: {name}" in str(raised.value)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("scores", MISSING, "is missing"),
        ("scores", [0.0], "has 1 entries"),
        ("scores", [float("nan")] * 2000, "finite numbers"),
        ("scores", ["0"] * 2000, "finite numbers"),
        ("unknown_token_id", 10**6, "has ids 0 to"),
        ("add_space_prefix", "yes", "must be true or false"),
    ],
)
def test_malformed_sentencepiece_metadata_is_refused_by_key(key: str, value: Any, problem: str) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=True)
    name = f"tokenizer.ggml.{key}"
    if value is MISSING:
        del metadata[name]
    else:
        metadata[name] = value
    with pytest.raises(CheckpointError) as raised:
        read(metadata)
    assert f"model.gguf: {name}" in str(raised.value)
    assert problem in str(raised.value)


def test_a_prompt_that_needs_bos_is_refused_where_there_is_none() -> None:
    metadata = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": True}
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.bos_token_id is missing.*add_bos_token"):
        read(metadata)
