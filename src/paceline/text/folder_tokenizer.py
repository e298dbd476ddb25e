"""A tokenizer from a folder in Hugging Face's layout: ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from paceline.errors import CheckpointError
from paceline.text.parts import TokenCoding, TokenizerParts

TOKENIZER_FILE = "tokenizer.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Raises CheckpointError naming the file, and the item in it, that is missing or not supported."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a tokenizer is read from this file only")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exception of its own
        raise CheckpointError(f"{path}: {error}") from error
    # Settings left over from training would cut prompts.
    backend.no_truncation()
    backend.no_padding()
    config = read_tokenizer_config(folder)
    names = _named_tokens(config)
    _mark_special(backend, {*names.values(), *_extra_tokens(config)})
    coding, strips_space = _coding(backend.decoder, path)
    ids = {name: backend.token_to_id(text) for name, text in names.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    prefix, suffix = _affixes(backend, path)
    # Some tokenizers leave the BOS token to the code around them.
    if config.get("add_bos_token") is True and bos is not None and bos not in prefix:
        prefix = (bos, *prefix)
    return TokenizerParts(
        backend=backend,
        coding=coding,
        strips_space=strips_space,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=bos,
        eos_ids=() if eos is None else (eos,),
        unk_id=ids.get("unk_token"),
        prefix=prefix,
        suffix=suffix,
    )


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over ``special_tokens_map.json``; either may be absent."""
    return {**_read_object(folder / "special_tokens_map.json"), **_read_object(folder / "tokenizer_config.json")}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _extra_tokens(config: dict[str, Any]) -> set[str]:
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    texts = map(_token_text, extra if isinstance(extra, list) else ())
    return {text for text in texts if text is not None}


def _token_text(value: object) -> str | None:
    """The text of a token, which is written as a string or as an object with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _mark_special(backend: tokenizers.Tokenizer, texts: set[str]) -> None:
    """Tokens that the configuration names are control tokens, even where ``tokenizer.json`` does not say so."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in sorted(texts):
        token = added.get(text, AddedToken(text, normalized=False))
        if backend.token_to_id(text) is not None and not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _coding(decoder: Any, path: Path) -> tuple[TokenCoding, bool]:
    """How entries stand for bytes, and whether decoding drops a space at the start of a text."""
    steps = _steps(None if decoder is None else json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return TokenCoding.BYTE_LEVEL, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return TokenCoding.METASPACE, strips
    raise CheckpointError(
        f"{path}: decoder {'+'.join(sorted(kinds)) or 'null'} is not supported (those that are: ByteLevel, "
        "ByteFallback, Metaspace)"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _affixes(backend: tokenizers.Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    probe = "a"
    inner = backend.encode(probe, add_special_tokens=False).ids
    whole = backend.encode(probe).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    raise CheckpointError(f"{path}: the post-processor changes the text's own tokens, which is not supported")
