"""From a conversation to tokens, in which only the template can place control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import RequestError
from paceline.text.messages import normalise_messages
from paceline.text.stand_ins import map_strings, strings_in, unused_characters
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.text.chat_template import ChatTemplate


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render a conversation and tokenise it. Templates write BOS themselves, so none is added.

    Names of control tokens in messages, tools and variables are plain text: while the template is rendered, their
    characters are written by private-use characters, one for one, so that lengths, slices and comparisons in the
    template go on working. Otherwise the tokens are those of the rendered text as a whole.

    Raises RequestError as :meth:`ChatTemplate.render` does.
    """
    variables = dict(template_kwargs or {})
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    clash = {"messages", "tools", *options} & variables.keys()
    if clash:
        raise RequestError(f"chat_template_kwargs cannot set {min(clash)!r}", "chat_template_kwargs")
    try:
        conversation = normalise_messages(messages)
        given = (conversation, tools, variables)
        names = {name for text in strings_in(given) for name in tokenizer.control_pattern.findall(text)}
        if not names:
            text = template.render(conversation, tools=tools, **options, **variables)
            return tokenizer.encode(text, add_special=False)
        free = unused_characters(given, template.sources)
        stand_ins = {next(free): character for character in sorted(set("".join(names)))}
        table = {ord(character): stand_in for stand_in, character in stand_ins.items()}

        def protect(value: Any) -> Any:
            return map_strings(
                value, lambda text: tokenizer.control_pattern.sub(lambda name: name[0].translate(table), text)
            )

        # A role is one of ours, even where a control token has the same name.
        protected = [{**protect(message), "role": message["role"]} for message in conversation]
        text = template.render(protected, tools=protect(tools), **options, **protect(variables))
        return tokenizer.encode_protected(text, stand_ins)
    except RecursionError:
        raise RequestError("messages are nested too deeply", "messages") from None
