"""Where a model's thinking begins and ends, as its tokenizer and chat template tell."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.text.tokenizer import Tokenizer

KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """Token ids, as they follow other text.

    Attributes:
        start, end: what opens and what ends a block.
        close: what ends one whose budget is used up: ``end``, with line breaks around it if the model was trained so.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    close: tuple[int, ...]


def find_thinking_tags(
    tokenizer: Tokenizer,
    template: str = "",
    *,
    start: str | None = None,
    end: str | None = None,
    close: str | None = None,
) -> ThinkingTags | None:
    """The tags of a model, or None if it has none.

    Known tags are those that are tokens of their own, else those whose end the chat template mentions. The block is
    closed with line breaks if the template writes it so. Texts that are given override what is found.

    Raises ConfigError for a start without an end or the reverse, for one that is empty or cannot be spelt, and for
    a close that does not contain the end.
    """
    if (start is None) != (end is None):
        raise ConfigError("thinking_start and thinking_end must be given together")
    if start is None or end is None:
        known = _known_tags(tokenizer, template)
        if known is None:
            if close is not None:
                raise ConfigError("thinking_close needs thinking_start and thinking_end: the model has no known ones")
            return None
        start, end = known
    if not start or not end:
        raise ConfigError("thinking_start and thinking_end must not be empty")
    if close is None:
        written_so = f"\n{end}\n\n" in template.replace("\\n", "\n")
        can_write = None not in (_ids(tokenizer, "\n"), _ids(tokenizer, "\n\n"))
        close = f"\n{end}\n\n" if written_so and can_write else end
    before, found, after = close.partition(end)
    if not found:
        raise ConfigError(f"thinking_close must contain the end of the thinking, {end!r}")
    opening, line, ending, rest = (_spell(tokenizer, text) for text in (start, before, end, after))
    return ThinkingTags(opening, ending, line + ending + rest)


def _known_tags(tokenizer: Tokenizer, template: str) -> tuple[str, str] | None:
    spelt = {tags: [_ids(tokenizer, tag) for tag in tags] for tags in KNOWN_TAGS}
    usable = {tags: ids for tags, ids in spelt.items() if None not in ids}
    for tags, ids in usable.items():
        if all(one is not None and len(one) == 1 for one in ids):
            return tags
    return next((tags for tags in usable if tags[1] in template), None)


def _spell(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    ids = _ids(tokenizer, text)
    if ids is None:
        raise ConfigError(f"the tokenizer cannot spell {text!r}, which is to open or end the thinking")
    return ids


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...] | None:
    """The tokens that are the text to the byte, after other text; None if there are none."""
    ids = tokenizer.spellings(text)[0] if text else []
    return tuple(ids) if b"".join(map(tokenizer.token_bytes, ids)) == text.encode() else None
