"""What is served, and whether it is well: models, health, version; and what acts on the whole of it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.api.openai.json_text import to_json
from paceline.api.openai.requests import MAX_SEQUENCES, AbortBody, UpdateWeightsBody, parse_body
from paceline.api.openai.service import Service
from paceline.engine.service import EngineState
from paceline.errors import CheckpointError, ConfigError, RequestError
from paceline.sampling_params import MAX_CHOICES, MAX_STOP_STRINGS


def list_models(service: Service) -> Response:
    models = [_model(service, name) for name in (*service.model_names, *service.adapters)]
    return Response(to_json({"object": "list", "data": models}), media_type="application/json")


def show_model(service: Service, name: str) -> Response:
    return Response(to_json(_model(service, service.served_name(name))), media_type="application/json")


def _model(service: Service, name: str) -> dict[str, Any]:
    """A root is what was loaded; an adapter's is its folder, and its parent the model that it was made for."""
    own = service.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": service.engine.created,
        "owned_by": "paceline",
        "root": service.adapters.get(name, service.engine.model_name),
        "parent": own if name in service.adapters else None,
        "max_model_len": service.engine.max_model_len,
    }


def health(service: Service) -> Response:
    """The engine's state: 200 while it takes requests, or refuses them on purpose; 503 once it cannot run by itself."""
    state = service.engine.state
    if state not in (EngineState.SLEEPING, EngineState.LOADING):
        service.engine.check_available()
    status = "ok" if state is EngineState.RUNNING else state.value
    return Response(to_json({"status": status}), media_type="application/json")


def version(service: Service) -> Response:
    """The version, and the limits that a request meets."""
    answer = {
        "version": __version__,
        "numerics": service.engine.numerics,
        "limits": {
            "max_model_len": service.engine.max_model_len,
            "max_n": MAX_CHOICES,
            "max_logprobs": service.engine.max_logprobs,
            "max_stop_strings": MAX_STOP_STRINGS,
            "max_sequences": MAX_SEQUENCES,
            "max_body_bytes": service.config.max_body_bytes,
        },
    }
    return Response(to_json(answer), media_type="application/json")


async def abort(service: Service, request: Request) -> Response:
    """End a request that runs or waits; its answer gets the finish reason ``abort``. Unknown ids are no error."""
    body = AbortBody.model_validate(await service.read_object(request))
    answer = {"request_id": body.request_id, "aborted": service.running.abort(body.request_id)}
    return Response(to_json(answer), media_type="application/json")


async def sleep(service: Service) -> Response:
    """Give the engine's memory back; what is in flight waits. Raises EngineUnavailable unless it runs."""
    await service.engine.sleep()
    return health(service)


async def wake_up(service: Service) -> Response:
    """Load the model again; answers once it runs. Raises EngineUnavailable unless it sleeps."""
    await service.engine.wake_up()
    return health(service)


async def update_weights(service: Service, request: Request) -> Response:
    """Serve another model in the present one's place; answers once it runs. Raises RequestError if it cannot be loaded.

    What runs may end before, or is ended by ``abort_all_requests``. The present model is served on if it fails.
    """
    body = parse_body(UpdateWeightsBody, await service.read_object(request))
    try:
        await service.engine.load_weights(body.model_path, abort_running=bool(body.abort_all_requests))
    except (CheckpointError, ConfigError) as error:
        raise RequestError(f"model_path: {error}", "model_path") from None
    answer = {"success": True, "message": f"{service.engine.model_name} is served", "model": service.model_names[0]}
    return Response(to_json(answer), media_type="application/json")


def reset_prefix_cache(service: Service) -> Response:
    service.engine.reset_prefix_cache()
    return health(service)
