"""Private second names for control tokens.

A chat prompt mixes the template's text, in which control tokens are meant, with what users wrote, in which nothing may
become one. It has to be tokenised as a whole, since words and spaces are joined across the border between the two. So
the template's control tokens are written by names that nobody else knows, and the whole is tokenised with control
tokens switched off.
"""

from __future__ import annotations

import re
import secrets

import tokenizers
from tokenizers import AddedToken

_MARK = "\U0010fffd"  # private use


class ControlNames:
    """Gives every special token of a backend another name. The names get ids of their own, behind all others.

    They are drawn at random: a text can contain one only by having been given it. ``pattern`` matches the tokens' own
    names.
    """

    def __init__(self, backend: tokenizers.Tokenizer, pattern: re.Pattern[str]) -> None:
        secret = secrets.token_hex(16)
        self._names: dict[str, str] = {}
        twins = []
        special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        for token_id, token in special.items():
            name = f"{_MARK}{secret}{token_id}{_MARK}"
            self._names[token.content] = name
            # Not special, so it is found while special ones are not; else it treats the text around it in the same way.
            twins.append(
                AddedToken(
                    name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
            )
        backend.add_tokens(twins)
        self._ids = {backend.token_to_id(self._names[token.content]): i for i, token in special.items()}
        self._pattern = pattern

    def write(self, text: str) -> str:
        """The text with each control token in it written by its private name."""
        return self._pattern.sub(lambda match: self._names[match[0]], text)

    def true_id(self, token_id: int) -> int:
        """The id of the token that is meant."""
        return self._ids.get(token_id, token_id)
