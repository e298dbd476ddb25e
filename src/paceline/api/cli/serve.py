"""``paceline serve``: a model behind the OpenAI API."""

from __future__ import annotations

import argparse

from paceline.api.cli.flags import engine_config
from paceline.api.server import ServerConfig, run_server
from paceline.api.server_config import check_adapter_names, read_api_keys
from paceline.config import read_environment
from paceline.engine.launch import launch_engine


def serve(args: argparse.Namespace) -> int:
    config = engine_config(args)
    environment = read_environment()
    keys = [*(args.api_key or ()), *_split(environment.api_key)]
    if args.api_key_file is not None:
        keys += read_api_keys(args.api_key_file)
    server = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        admin_api_keys=(*(args.admin_api_key or ()), *_split(environment.admin_api_key)),
        allowed_origins=tuple(args.allowed_origins or ()),
        trust_request_chat_template=args.trust_request_chat_template,
        max_body_bytes=args.max_body_bytes,
        ping_interval=args.ping_interval,
        journal=args.journal,
        shutdown_timeout=args.shutdown_timeout,
        served_model_names=tuple(args.served_model_name or (args.model,)),
    )
    check_adapter_names(config.lora or (), server.served_model_names)
    run_server(launch_engine(config, in_process=args.in_process), server)
    return 0


def _split(keys: str | None) -> list[str]:
    return [key for key in (keys or "").split(",") if key]
