from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError, RequestError
from paceline.text.chat_template import ChatTemplate, load_chat_template
from paceline.text.gguf_tokenizer import read_gguf_tokenizer
from paceline.text.tokenizer import Tokenizer
from support.tokenizer_gguf import byte_level_metadata

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_a_conversation_becomes_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages, add_generation_prompt=False) == text
    assert render(CHATML, messages) == text + "<|im_start|>assistant\n"


def test_lines_with_blocks_only_leave_nothing_behind() -> None:
    assert (
        render("{% if true %}\n    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n{% endif %}\n") == "Hi\n"
    )


def test_templates_have_what_they_expect() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ tools is none }} {{ enable_thinking }}", enable_thinking=False) == "True False"
    assert render("{{ tools | tojson }}", tools=[{"a": "<é'&>"}]) == '[{"a": "<é\'&>"}]'
    assert render("{{ messages[0] | tojson(indent=1) }}") == json.dumps(USER[0], indent=1)
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    skip = "{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip + "{{ i }}{% endfor %}") == "013"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "Hi"


def test_loops_know_where_they_are() -> None:
    source = "{% for i in items if i %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% else %}-"
    source += "{% endfor %}"
    assert render(source, items=[1, 0, 2, 3]) == "1/3,2/3,3/3."
    assert render(source, items=[]) == "-"
    assert render(source) == "-"
    tree = "{% for n in tree recursive %}{{ n.v }}({{ loop(n.c) }}){% endfor %}"
    assert render(tree, tree=[{"v": 1, "c": [{"v": 2, "c": []}]}]) == "1(2())"
    assert render("{% for k, v in d.items() %}{{ k }}={{ v }} {% endfor %}", d={"a": 1, "b": 2}) == "a=1 b=2 "


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
        "{% for a in range(10**5) %}{% for b in range(10**5) %}x{% endfor %}{% endfor %}",
        "{% for a in range(10**5) %}{% for b in range(10**5) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set r = range(10**5) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for n in range(9) recursive %}{{ loop(range(9)) if loop.depth < 20 }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
        ChatTemplate(source, time_limit=0.2).render(USER)
    assert time.monotonic() - begin < 20


def test_a_template_that_calls_itself_for_ever_is_stopped() -> None:
    with pytest.raises(RequestError, match="refused the messages: maximum recursion depth"):
        render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


@pytest.mark.parametrize("source", ["{{ 10 ** (10 ** 9) }}", "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 10 * [1] }}"])
def test_a_template_cannot_ask_for_giants(source: str) -> None:
    with pytest.raises(RequestError, match="too l"):
        render(source)


def test_a_template_cannot_reach_beyond_its_variables() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"):
        with pytest.raises(RequestError, match="refused the messages"):
            render(source)


def test_the_template_s_own_words_reach_the_caller() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Start with the user!') }}{% endif %}"
    with pytest.raises(RequestError, match="refused the messages: Start with the user!") as raised:
        render(source, [{"role": "system", "content": "x"}])
    assert raised.value.param == "messages"
    with pytest.raises(RequestError, match="refused the messages"):
        render("{{ messages[5].content.upper() }}")


def test_content_is_given_in_the_form_that_the_template_shows() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "ab"
    by_parts = "{% for p in messages[0].content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}"
    assert render(by_parts, messages) == "[ab]"
    assert render(by_parts) == "[Hi]"
    both = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + by_parts + "{% endif %}"
    assert render(both, messages) == "ab"


def test_a_final_message_is_continued_with_its_exact_content() -> None:
    final = " \n  The answer is "
    messages = [*USER, {"role": "assistant", "content": final}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, messages, **options) == head + final
    trimming = CHATML.replace("message.content", "(message.content | trim)")
    assert render(trimming, messages, **options) == head + final
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": final}]}]
    assert render(CHATML, parts, **options) == head + final
    empty = [*USER, {"role": "assistant", "content": ""}]
    assert render(CHATML, empty, **options) == head
    # The content may stand in the text before, too.
    same = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    assert render(CHATML, same, **options) == head + "Hi"


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ([*USER, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}, "exclude each other"),
        (USER, {"add_generation_prompt": False}, "role assistant"),
        ([*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], {"add_generation_prompt": False},
         "no tool calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(
    messages: list[dict[str, Any]], options: dict[str, bool], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as raised:
        render(CHATML, messages, continue_final_message=True, **options)
    assert raised.value.param == "continue_final_message"


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="does not show the last message"):
        render("{{ messages[0].content }}", [*USER, {"role": "assistant", "content": "Hi"}],
               add_generation_prompt=False, continue_final_message=True)  # fmt: skip


def test_variables_of_our_own_cannot_be_set() -> None:
    with pytest.raises(RequestError, match="cannot set 'bos_token'"):
        render(CHATML, USER, **{"bos_token": "x"})


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(CheckpointError, match=r"x\.jinja: line 2: .*"):
        ChatTemplate("\n{% if %}", origin="x.jinja")


# ---- where templates come from


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(read_gguf_tokenizer(byte_level_metadata(), Path("model.gguf")))


def shown(template: ChatTemplate | None, **options: Any) -> str | None:
    return None if template is None else template.render(USER, **options)


def test_a_gguf_file_holds_its_templates(tokenizer: Tokenizer) -> None:
    def load(**sources: Any) -> ChatTemplate | None:
        metadata = {f"tokenizer.{key.replace('__', '.')}": value for key, value in sources.items()}
        return load_chat_template(Checkpoint(Path("m.gguf"), CheckpointFormat.GGUF, metadata, {}), tokenizer)

    assert load() is None
    assert shown(load(chat_template="{{ bos_token }}1")) == "<|im_start|>1"
    both = load(chat_template="{{ eos_token }}2", chat_template__tool_use="tools")
    assert shown(both) == "<|im_end|>2"
    assert shown(both, tools=[{"name": "f"}]) == "tools"
    assert shown(both, tools=[]) == "<|im_end|>2"
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.chat_template must be a string"):
        load(chat_template=[1])


def test_a_folder_holds_its_templates_in_one_of_several_places(tokenizer: Tokenizer, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, CheckpointFormat.SAFETENSORS, {}, {})

    def load(config: dict[str, Any]) -> ChatTemplate | None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_chat_template(checkpoint, tokenizer)

    assert load({}) is None
    assert shown(load({"chat_template": "string"})) == "string"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    assert shown(load({"chat_template": named})) == "named"
    assert shown(load({"chat_template": named}), tools=[{}]) == "tools"
    with pytest.raises(CheckpointError, match=r"none of the templates \(tool_use\) is named 'default'"):
        load({"chat_template": named[1:]})
    for bad in (5, [5], [{"name": "default"}]):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be a string or a list"):
            load({"chat_template": bad})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert shown(load({"chat_template": "string"})) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert shown(load({"chat_template": "string"})) == "jinja"
    (tmp_path / "other.jinja").write_text("other é", encoding="utf-8")
    assert shown(load_chat_template(checkpoint, tokenizer, tmp_path / "other.jinja")) == "other é"
    with pytest.raises(CheckpointError, match=r"missing\.jinja"):
        load_chat_template(checkpoint, tokenizer, tmp_path / "missing.jinja")


def test_a_template_tells_what_a_caller_may_set() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% set x = m.thinking %}{% endfor %}{{ raise_exception if y else x }}"
    )
    tools = "{% if enable_thinking is defined and not enable_thinking %}a{% endif %}"
    assert ChatTemplate(source, tool_source=tools).variables >= {"messages", "y", "enable_thinking"}
    assert "thinking" not in ChatTemplate(source).variables
