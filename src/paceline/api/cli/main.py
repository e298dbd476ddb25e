"""The ``paceline`` command: parse, dispatch, turn errors into messages and exit codes.

Only light modules are imported here, so that ``--help`` and ``--version`` answer at once. Exit codes: 0 is success, 1 a
failure while running, 2 a mistake in the command line, 130 an interrupt.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__
from paceline.api.cli.flags import Parser, add_engine_flags, memory_size
from paceline.config import DEFAULT_MODEL
from paceline.errors import CheckpointError, ConfigError, RequestError

MODEL_HELP = f"folder, .gguf file, alias or Hugging Face name [{DEFAULT_MODEL}]"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.command is None:
        build_parser().print_help()
        return 2
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(levelname).1s %(asctime)s %(name)s: %(message)s"
    )
    try:
        return _run_command(args)
    except (CheckpointError, ConfigError, RequestError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stderr.close()
        return 1


def build_parser() -> Parser:
    parser = Parser(prog="paceline", description="An inference engine for language models on CPUs.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_run(
        commands.add_parser("run", help="answer one prompt, or chat", description="Answer a prompt in the terminal.")
    )
    _add_serve(commands.add_parser("serve", help="serve the OpenAI API", description="Serve a model over HTTP."))
    pull = commands.add_parser("pull", help="fetch a model", description="Fetch a model and print where it is.")
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    inspect = commands.add_parser("inspect", help="describe a model", description="Describe a model's files.")
    inspect.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    inspect.add_argument("--quantization", help="tell what this setting would make of the matrices: int8 or int4")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--template", action="store_true", help="print the whole chat template")
    for command in (pull, inspect):
        _add_log_level(command)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_and_prompt", nargs="*", metavar="[MODEL] PROMPT", help=MODEL_HELP + "; then the prompt")
    parser.add_argument("--chat", action="store_true", help="hold a conversation; an empty line or Ctrl-D ends it")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--stats", action="store_true", help="print token counts and speed at the end")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token [0]")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--max-tokens", type=int, default=1024, help="output tokens at most [1024]")
    group.add_argument("--sampling-seed", type=int, help="makes a sampled answer repeatable")
    add_engine_flags(parser)
    _add_log_level(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="[127.0.0.1]")
    group.add_argument("--port", type=int, default=8000, help="[8000]; 0 takes a free one")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="require this key (repeatable; also $PACELINE_API_KEY)"
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="require one of the keys in it, one a line")
    group.add_argument(
        "--admin-api-key",
        action="append",
        metavar="KEY",
        help="require this key to put the server to sleep, change its weights or reset its cache (repeatable)",
    )
    group.add_argument(
        "--allowed-origins", nargs="+", metavar="ORIGIN", help="web pages that may call from a browser; * is all [none]"
    )
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring their own chat_template"
    )
    group.add_argument("--max-body-bytes", type=memory_size, default=32 * 2**20, help="largest request body [32MiB]")
    group.add_argument("--ping-interval", type=float, help="seconds of silence after which a stream gets a comment")
    group.add_argument(
        "--journal", type=Path, metavar="FILE", help="note streams in it, so that they go on after a restart [none]"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=10.0, help="seconds that running requests have at the end [10]"
    )
    group.add_argument(
        "--in-process", action="store_true", help="no process of its own for the engine: its death is the server's"
    )
    add_engine_flags(parser)
    _add_log_level(parser, "info")


def _add_log_level(parser: argparse.ArgumentParser, default: str = "warning") -> None:
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", choices=levels, default=default, help=f"[{default}]")


def _run_command(args: argparse.Namespace) -> int:
    if args.command == "run":
        from paceline.api.cli.run import run

        return run(args)
    if args.command == "serve":
        from paceline.api.cli.serve import serve

        return serve(args)
    if args.command == "pull":
        from paceline.api.cli.pull import pull

        return pull(args)
    from paceline.api.cli.inspect import inspect

    return inspect(args)
