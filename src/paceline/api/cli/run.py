"""``paceline run``: an answer in the terminal, streamed as it is made."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from paceline.api.cli.flags import engine_config
from paceline.api.llm import LLM
from paceline.config import DEFAULT_MODEL
from paceline.engine.load import load_engine
from paceline.errors import ConfigError, RequestError
from paceline.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    args.model, prompt = _model_and_prompt(args)
    if not args.chat and (prompt is None or not prompt.strip()):
        raise RequestError("there is no prompt: give one as an argument or on standard input", "prompt")
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
        seed=args.sampling_seed,
    )
    if len(args.lora or ()) > 1:
        raise ConfigError(f"lora: an answer can have one adapter, but {len(args.lora)} were given")
    config = engine_config(args)
    with LLM.from_engine(load_engine(config), seed=config.seed) as llm:
        if args.chat:
            return _converse(llm, args, params, prompt)
        assert prompt is not None
        _answer(llm, args, prompt if args.raw else _messages(args.system, prompt), params)
    return 0


def _model_and_prompt(args: argparse.Namespace) -> tuple[str, str | None]:
    words = args.model_and_prompt
    if len(words) > 2:
        raise RequestError(f"expected [MODEL] PROMPT, got {len(words)} words: put quotes around the prompt", "prompt")
    if args.chat:
        return (words[0] if words else DEFAULT_MODEL), (words[1] if len(words) == 2 else None)
    if len(words) == 2:
        return words[0], words[1]
    if words and not _is_model(words[0]):
        return DEFAULT_MODEL, words[0]
    piped = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    return words[0] if words else DEFAULT_MODEL, piped


def _is_model(word: str) -> bool:
    """Whether a lone word can only be meant as a model: a GGUF file, or a folder with one or with a configuration."""
    path = Path(word)
    return path.suffix == ".gguf" or (path / "config.json").is_file() or (path.is_dir() and any(path.glob("*.gguf")))


def _messages(system: str | None, prompt: str) -> list[dict[str, Any]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": prompt}]


def _converse(llm: LLM, args: argparse.Namespace, params: SamplingParams, first: str | None) -> int:
    messages: list[dict[str, Any]] = _messages(args.system, "")[:-1]
    while True:
        try:
            said = first if first is not None else input("> ")
        except EOFError:
            print()
            return 0
        first = None
        if not said.strip():
            return 0
        messages.append({"role": "user", "content": said})
        try:
            answer = _answer(llm, args, messages, params)
        except RequestError as error:
            print(f"paceline: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, args: argparse.Namespace, prompt: Any, params: SamplingParams) -> str:
    """Print an answer as it comes, with the adapter that was given, and return it.

    Ctrl-C ends the answer, not the program.
    """
    begin = time.perf_counter()
    first = begin
    text, tokens = "", 0
    stream = llm.stream(prompt, params, lora_request=next(iter(args.lora or ()), None))
    try:
        for delta in stream:
            if not tokens:
                first = time.perf_counter()
            text += delta.text
            tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise RequestError(delta.error)
    except KeyboardInterrupt:
        stream.close()
        print(" [interrupted]", file=sys.stderr)
    print(flush=True)
    if args.stats:
        took = time.perf_counter() - first
        speed = f"{(tokens - 1) / took:.1f} tokens/s after it" if tokens > 1 and took > 0 else "no speed to tell"
        print(f"{tokens} tokens; first after {first - begin:.2f} s, {speed}", file=sys.stderr)
    return text
