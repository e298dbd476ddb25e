from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from paceline.errors import ConfigError
from paceline.text.parts import TokenCoding, TokenizerParts
from paceline.text.thinking import ThinkingTags, find_thinking_tags
from paceline.text.token_bytes import byte_level_alphabet
from paceline.text.tokenizer import Tokenizer


def make_tokenizer(*added: str) -> Tokenizer:
    """Bytes, and tokens of their own from 256 on, which are not special."""
    vocab = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_tokens([AddedToken(name, special=False) for name in added])
    return Tokenizer(
        TokenizerParts(
            backend, TokenCoding.BYTE_LEVEL, strips_space=False, vocab_size=256 + len(added), bos_id=None, eos_ids=(),
            unk_id=None, prefix=(), suffix=(),
        )
    )  # fmt: skip


PLAIN = make_tokenizer()
TAGGED = make_tokenizer("[THINK]", "[/THINK]")
NEW_LINE = ord("\n")


def found(tokenizer: Tokenizer, template: str = "", **given: str) -> ThinkingTags:
    tags = find_thinking_tags(tokenizer, template, **given)
    assert tags is not None
    return tags


def test_tags_that_are_tokens_of_their_own_are_found() -> None:
    assert found(TAGGED) == ThinkingTags((256,), (257,), (257,))


def test_tags_that_only_the_template_mentions_are_spelt_out() -> None:
    template = "{{ message.content.split('</think>')[-1] }}"
    end = tuple(b"</think>")
    assert found(PLAIN, template) == ThinkingTags(tuple(b"<think>"), end, end)
    # Tokens of their own tell more than words in a template.
    assert found(TAGGED, template).end == (257,)


@pytest.mark.parametrize("template", ["{{ '\\n[/THINK]\\n\\n' ~ content }}", "{{ x }}\n[/THINK]\n\n{{ content }}"])
def test_line_breaks_around_the_end_are_those_of_the_template(template: str) -> None:
    assert found(TAGGED, template).close == (NEW_LINE, 257, NEW_LINE, NEW_LINE)
    assert found(TAGGED, template.replace("[/THINK]\\n\\n", "[/THINK]").replace("]\n\n", "]")).close == (257,)


def test_a_model_without_tags_does_not_think() -> None:
    assert find_thinking_tags(PLAIN, "{{ messages }}") is None


def test_tags_that_the_tokenizer_cannot_spell_are_none() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"<": 0, "a": 1, "?": 2}, [], unk_token="?"))
    parts = TokenizerParts(
        backend, TokenCoding.BYTE_LEVEL, strips_space=False, vocab_size=3, bos_id=None, eos_ids=(), unk_id=2, prefix=(),
        suffix=(),
    )  # fmt: skip
    assert find_thinking_tags(Tokenizer(parts), "</think>") is None
    with pytest.raises(ConfigError, match="cannot spell 'b'"):
        find_thinking_tags(Tokenizer(parts), start="<", end="b")


def test_given_texts_override_what_is_found() -> None:
    given = {"start": "(", "end": "))", "close": "so!)) "}
    assert found(TAGGED, **given) == ThinkingTags(tuple(b"("), tuple(b"))"), tuple(b"so!)) "))
    assert found(TAGGED, close="\n[/THINK]").close == (NEW_LINE, 257)
    assert found(PLAIN, start="(", end=")").close == tuple(b")")


@pytest.mark.parametrize(
    ("tokenizer", "given", "message"),
    [
        (TAGGED, {"start": "("}, "together"),
        (TAGGED, {"end": ")"}, "together"),
        (TAGGED, {"close": "enough"}, r"must contain .*\[/THINK\]"),
        (PLAIN, {"close": "x"}, "has no known ones"),
        (PLAIN, {"start": "", "end": ")"}, "empty"),
        (PLAIN, {"start": "(", "end": ""}, "empty"),
    ],
)
def test_texts_that_do_not_fit_are_refused(tokenizer: Tokenizer, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_thinking_tags(tokenizer, **given)
