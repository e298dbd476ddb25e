"""From a path to an open checkpoint, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.gguf import open_gguf, part_paths
from paceline.checkpoint.safetensors_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, open_safetensors_folder
from paceline.checkpoint.source import Checkpoint
from paceline.errors import CheckpointError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a safetensors folder, a GGUF file, or a folder with exactly one GGUF file (which may be split).

    The network is never used and no tensor data is read. Raises CheckpointError, naming file and item.
    """
    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: is one file of a checkpoint; give its folder, {path.parent}, instead")
        return open_gguf(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists():
        return open_safetensors_folder(path)
    models = sorted({part_paths(file)[0] for file in path.glob("*.gguf")})
    if not models:
        raise CheckpointError(
            f"{path}: holds no model: expected {CONFIG_FILE} with {SINGLE_FILE} or {INDEX_FILE}, or one .gguf file"
        )
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise CheckpointError(f"{path}: holds several GGUF models; give the path of one of them: {names}")
    return open_gguf(models[0])
