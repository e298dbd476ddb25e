from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError, RequestError
from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.tokenizer import Tokenizer, bad_word_ids, load_tokenizer
from support.text_corpus import TEXTS, random_texts
from support.tokenizer_gguf import byte_level_metadata, sentencepiece_metadata, write_model


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = read_gguf_tokenizer(byte_level_metadata("llama-bpe"), Path("model.gguf")).backend
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
    )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    backend = read_gguf_tokenizer(sentencepiece_metadata(add_space_prefix=True), Path("model.gguf")).backend
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint(folder, CheckpointFormat.SAFETENSORS, {}, {}))


BYTE_LEVEL_NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
SENTENCEPIECE_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("make", "names"),
    [(byte_level_backend, BYTE_LEVEL_NAMES), (sentencepiece_backend, SENTENCEPIECE_NAMES)],
)
def test_a_folder_is_read_as_transformers_reads_it(
    make: Callable[[], tokenizers.Tokenizer], names: dict[str, str], tmp_path: Path
) -> None:
    save(tmp_path, make(), tokenizer_class="PreTrainedTokenizerFast", **names)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.bos_id == oracle.bos_token_id
    assert tokenizer.eos_ids == (oracle.eos_token_id,)
    assert tokenizer.special_ids >= set(oracle.all_special_ids)
    for text in TEXTS + random_texts(100, seed=6):
        for add_special in (False, True):
            ids = tokenizer.encode(text, add_special=add_special)
            assert ids == oracle(text, add_special_tokens=add_special).input_ids
            for skip_special in (False, True):
                expected = oracle.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special=skip_special) == expected


def test_a_prompt_that_has_its_bos_and_eos_gets_no_second_ones(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, sentencepiece_backend(), **SENTENCEPIECE_NAMES))
    assert tokenizer.adds_bos
    ids = tokenizer.encode("a", add_special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.encode("<s>a", add_special=True) == ids
    assert tokenizer.encode("<s>a</s>", add_special=True) == ids
    assert tokenizer.encode("", add_special=True) == [1, 2]
    as_text = tokenizer.encode("<s>a", add_special=True, parse_special=False)
    assert as_text.count(1) == 1
    assert tokenizer.decode(as_text, skip_special=True) == "<s>a"


def test_bos_may_be_asked_for_beside_the_post_processor(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    assert not load(save(tmp_path, backend, **BYTE_LEVEL_NAMES)).adds_bos
    tokenizer = load(save(tmp_path, backend, add_bos_token=True, **BYTE_LEVEL_NAMES))
    assert tokenizer.encode("<|im_end|>", add_special=True) == [1, 2]


def test_names_come_from_objects_and_from_the_special_tokens_map_too(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), eos_token={"content": "<|im_end|>", "lstrip": False}, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "x"}))
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_tokens_that_the_configuration_names_are_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<mark>", normalized=False), AddedToken("<other>", normalized=False)])
    tokenizer = load(save(tmp_path, backend, additional_special_tokens=["<mark>"], **BYTE_LEVEL_NAMES))
    ids = tokenizer.encode("<mark><other>", add_special=False)
    assert [token in tokenizer.special_ids for token in ids] == [True, False]
    assert tokenizer.vocab_size == ids[1] + 1


def test_settings_for_training_do_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    ids = load(save(tmp_path, backend, **BYTE_LEVEL_NAMES)).encode("one two three four five", add_special=False)
    assert 4 < len(ids) < 64


def test_a_metaspace_decoder_drops_the_first_space_only_where_one_is_put(tmp_path: Path) -> None:
    for scheme, text in (("first", "the end"), ("never", " the end")):
        backend = sentencepiece_backend()
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme)
        backend.decoder = decoders.Metaspace("▁", scheme)
        tokenizer = load(save(tmp_path, backend, **SENTENCEPIECE_NAMES))
        ids = tokenizer.encode(text, add_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == b" the end"
        assert tokenizer.decode(ids, skip_special=True) == text


def test_the_tokenizer_may_be_taken_from_elsewhere(tmp_path: Path) -> None:
    empty = Checkpoint(tmp_path / "nowhere", CheckpointFormat.SAFETENSORS, {}, {})
    folder = tmp_path / "folder"
    folder.mkdir()
    save(folder, byte_level_backend(), **BYTE_LEVEL_NAMES)
    file = write_model(tmp_path / "model.gguf", byte_level_metadata("llama-bpe"))
    expected = load(folder).encode("some text 123", add_special=True)
    for override in (folder, folder / "tokenizer.json", file):
        assert load_tokenizer(empty, override).encode("some text 123", add_special=True) == expected


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        load(tmp_path)
    save(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text("{nonsense")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must hold a JSON object"):
        load(tmp_path)


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece is not supported"):
        load(save(tmp_path, backend))


def test_tokens_have_their_exact_bytes(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, byte_level_backend(), **BYTE_LEVEL_NAMES))
    ids = tokenizer.encode("👍 é<|im_end|>", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "👍 é<|im_end|>".encode()
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert all(tokenizer.token_bytes(token) == b"" for token in (-1, tokenizer.vocab_size, 2**40))
    parts = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xf0"]
    assert [tokenizer.token_text(token) for token in parts] == ["\ufffd"]


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, byte_level_backend(), **BYTE_LEVEL_NAMES))
    text = "some text <|im_end|> and more " * 50

    def encode(parse_special: bool) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=parse_special)

    kinds = [bool(index % 2) for index in range(200)]
    expected = {kind: encode(kind) for kind in (False, True)}
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(encode, kinds)) == [expected[kind] for kind in kinds]


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, byte_level_backend(), **BYTE_LEVEL_NAMES))
    with pytest.raises(RequestError, match=r"U\+D83D at 2"):
        tokenizer.encode("ab\ud83dc", add_special=True)
    assert tokenizer.encode("ab", add_special=False)


@pytest.mark.parametrize(
    ("make", "names"),
    [(byte_level_backend, BYTE_LEVEL_NAMES), (sentencepiece_backend, SENTENCEPIECE_NAMES)],
)
def test_bad_words_are_spelt_with_and_without_a_space(
    make: Callable[[], tokenizers.Tokenizer], names: dict[str, str], tmp_path: Path
) -> None:
    tokenizer = load(save(tmp_path, make(), **names))
    sequences = bad_word_ids(tokenizer, ["the", "year", "the"])
    spelt = [b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in sequences]
    assert spelt == ["the", " the", "year", " year"]
    assert all(tokenizer.special_ids.isdisjoint(ids) for ids in sequences)
    assert bad_word_ids(tokenizer, []) == ()
