"""``paceline serve``: a model behind the OpenAI API."""

from __future__ import annotations

import argparse

from paceline.api.cli.flags import engine_config
from paceline.api.server import ServerConfig, run_server
from paceline.api.server_config import check_adapter_names
from paceline.config import read_environment
from paceline.engine.launch import launch_engine


def serve(args: argparse.Namespace) -> int:
    config = engine_config(args)
    keys = tuple(args.api_key or ()) + tuple(filter(None, (read_environment().api_key or "").split(",")))
    server = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=keys,
        max_body_bytes=args.max_body_bytes,
        ping_interval=args.ping_interval,
        shutdown_timeout=args.shutdown_timeout,
        served_model_names=tuple(args.served_model_name or (args.model,)),
    )
    check_adapter_names(config.lora or (), server.served_model_names)
    run_server(launch_engine(config, in_process=args.in_process), server)
    return 0
