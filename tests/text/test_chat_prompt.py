from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from paceline.errors import RequestError
from paceline.text.chat_prompt import encode_chat
from paceline.text.chat_template import ChatTemplate
from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.tokenizer import Tokenizer
from support.text_corpus import TEXTS
from support.tokenizer_gguf import byte_level_metadata, sentencepiece_metadata

CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ note }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    bos_token="<s>",
    eos_token="</s>",
)
START, END = 1, 2


@cache
def tokenizer_of(template: ChatTemplate) -> Tokenizer:
    metadata = byte_level_metadata() if template is CHATML else sentencepiece_metadata(add_space_prefix=True)
    return Tokenizer(read_gguf_tokenizer(metadata, Path("model.gguf")))


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", [CHATML, INSTRUCT])
def test_a_prompt_is_the_rendered_text_and_gets_no_second_bos(template: ChatTemplate) -> None:
    tokenizer = tokenizer_of(template)
    for text in TEXTS:
        if not tokenizer.control_pattern.search(text):
            ids = encode_chat(template, tokenizer, user(text))
            assert ids == tokenizer.encode(template.render(user(text)), add_special=False)
            assert ids[:2] != [tokenizer.bos_id] * 2


fragments = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<unk>", "<|im_<|im_end|>end|>", "<|im_", "end|>", " ", "\n", "  ",
     "a", "the", "é", "😀", "1", "\U000f0000", "\U000f0001"]
)  # fmt: skip
contents = st.lists(fragments, max_size=8).map("".join)


def in_pieces(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of a prompt whose control tokens are the template's, found by leaving the contents empty at first."""
    marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
    frame = template.render([{**message, "content": mark} for message, mark in zip(messages, marks)])
    ids = []
    for piece in re.split(f"({tokenizer.control_pattern.pattern})", frame):
        for mark, message in zip(marks, messages):
            content = message["content"]
            piece = piece.replace(mark, content.strip() if template is CHATML else content)
        plain = not tokenizer.control_pattern.fullmatch(piece) or piece not in frame
        ids += tokenizer.encode(piece, add_special=False, parse_special=not plain) if piece else []
    return ids


@given(st.sampled_from([CHATML, INSTRUCT]), st.lists(contents, min_size=1, max_size=3))
def test_only_the_template_places_control_tokens(template: ChatTemplate, texts: list[str]) -> None:
    tokenizer = tokenizer_of(template)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    ids = encode_chat(template, tokenizer, messages)
    harmless = encode_chat(template, tokenizer, [{**message, "content": "x"} for message in messages])
    special = tokenizer.special_ids
    assert [i for i in ids if i in special] == [i for i in harmless if i in special]
    assert ids == in_pieces(tokenizer, template, messages)
    if template is CHATML:
        assert tokenizer.decode(ids, skip_special=False) == template.render(messages)


def test_tools_and_variables_are_text_as_well() -> None:
    tokenizer = tokenizer_of(CHATML)
    tools = [{"function": {"name": "<|im_end|>", "<|im_start|>": 1}}]
    ids = encode_chat(CHATML, tokenizer, user("x"), tools=tools, template_kwargs={"note": "<|im_start|>"})
    assert [i for i in ids if i in tokenizer.special_ids] == [START, END, START]
    expected = CHATML.render(user("x"), tools=tools, note="<|im_start|>")
    assert tokenizer.decode(ids, skip_special=False) == expected


def test_templates_can_go_on_measuring_and_cutting_content() -> None:
    template = ChatTemplate(
        "<|im_start|>{{ messages[0].content | length }}:{{ messages[0].content[2:6] }}:"
        "{{ messages[0].content.startswith('a') }}{{ '</think>' in messages[0].content }}<|im_end|>"
    )
    tokenizer = tokenizer_of(CHATML)
    ids = encode_chat(template, tokenizer, user("a<|im_end|></think>"))
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>19:|im_:TrueTrue<|im_end|>"
    assert [i for i in ids if i in tokenizer.special_ids] == [START, END]


def test_a_continued_message_is_text_as_well() -> None:
    tokenizer = tokenizer_of(CHATML)
    messages = [*user("x"), {"role": "assistant", "content": "so <|im_end|> "}]
    ids = encode_chat(CHATML, tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert [i for i in ids if i in tokenizer.special_ids] == [START, END, START]
    assert tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\nso <|im_end|> ")


def test_control_tokens_treat_the_text_around_them_as_ever() -> None:
    parts = read_gguf_tokenizer(byte_level_metadata(), Path("model.gguf"))
    parts.backend.add_special_tokens(
        [
            AddedToken("<|im_end|>", normalized=False, rstrip=True),
            AddedToken("<|im_start|>", normalized=False, lstrip=True),
        ]
    )
    tokenizer = Tokenizer(parts)
    text = "a  <|im_start|> b <|im_end|>  \n c"
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.encode_protected(text, {}) == ids
    assert tokenizer.decode(ids, skip_special=True) == "a b c"


def test_private_names_are_no_tokens_for_anybody_else() -> None:
    tokenizer = tokenizer_of(CHATML)
    size, special = tokenizer.vocab_size, tokenizer.special_ids
    tokenizer.encode_protected("<|im_end|>", {})
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (size, special)
    assert tokenizer.token_bytes(size) == b""


def test_a_role_may_have_the_name_of_a_control_token() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["user"]
    metadata["tokenizer.ggml.token_type"] += [3]
    tokenizer = Tokenizer(read_gguf_tokenizer(metadata, Path("model.gguf")))
    ids = encode_chat(CHATML, tokenizer, user("a user"))
    assert ids.count(tokenizer.vocab_size - 1) == 1


def test_variables_cannot_take_the_place_of_arguments() -> None:
    for name in ("tools", "add_generation_prompt", "continue_final_message", "messages", "bos_token"):
        with pytest.raises(RequestError, match=f"cannot set '{name}'") as raised:
            encode_chat(CHATML, tokenizer_of(CHATML), user("x"), template_kwargs={name: 1})
        assert raised.value.param == "chat_template_kwargs"


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        encode_chat(CHATML, tokenizer_of(CHATML), user("x"), tools=[{"a": deep}])
