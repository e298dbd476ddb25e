"""The bytes that vocabulary entries stand for."""

from __future__ import annotations

import re

from paceline.text.parts import TokenCoding

_BYTE_ENTRY = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes in byte-level vocabularies.

    GPT-2's table: a byte that is a visible Latin-1 character stands for itself, and the others take the characters
    from U+0100 upwards in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_level_alphabet())}


def entry_bytes(entry: str, coding: TokenCoding) -> bytes:
    """The bytes of a vocabulary entry that is not an added token."""
    if coding is TokenCoding.BYTE_LEVEL:
        try:
            return bytes(map(_BYTE_OF.__getitem__, entry))
        except KeyError:  # not written in the alphabet, so it means itself
            return entry.encode()
    byte = _BYTE_ENTRY.fullmatch(entry)
    return bytes.fromhex(byte[1]) if byte else added_bytes(entry, coding)


def added_bytes(content: str, coding: TokenCoding) -> bytes:
    """The bytes of an added token: its text as it stands, but for the character that means a space."""
    return (content if coding is TokenCoding.BYTE_LEVEL else content.replace("▁", " ")).encode()
