"""The real model's tokenizer and template, against llama.cpp and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.checkpoint.open import open_checkpoint
from paceline.checkpoint.source import Checkpoint
from paceline.text.chat_template import load_chat_template
from paceline.text.tokenizer import Tokenizer, load_tokenizer
from support.llamacpp import LlamaCpp
from support.text_corpus import TEXTS, random_texts

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint)


def test_every_text_has_the_tokens_that_llama_cpp_gives_it(smollm2_path: Path, tokenizer: Tokenizer) -> None:
    oracle = LlamaCpp(smollm2_path)
    names = [tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)]
    around = [f"a{name}b {name}  c{name}{name}\n{name} " for name in names]
    for text in [*TEXTS, *random_texts(200, seed=1), *around]:
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special=True, parse_special=parse_special)
            assert ids == oracle.tokenize(text, add_special=True, parse_special=parse_special), text
            assert tokenizer.decode(ids, skip_special=False) == text


def test_the_tokenizer_knows_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == (2, 0)
    assert len(tokenizer.special_ids) == 17
    assert not tokenizer.adds_bos


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi \n"}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_conversations_are_rendered_as_transformers_renders_them(
    checkpoint: Checkpoint, tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    template = load_chat_template(checkpoint, tokenizer)
    assert template is not None
    source = checkpoint.metadata["tokenizer.chat_template"]
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=add_generation_prompt
    )
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected
