"""Adapters as the ``peft`` library writes them: ``adapter_config.json`` beside ``adapter_model.safetensors``."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.safetensors_folder import read_json_file, read_safetensors
from paceline.checkpoint.source import Checkpoint, CheckpointFormat
from paceline.errors import CheckpointError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PICKLED_ADAPTER_FILE = "adapter_model.bin"


def open_adapter_folder(folder: Path) -> Checkpoint:
    """Open an adapter's folder; ``metadata`` is its configuration.

    No tensor data is read. Raises CheckpointError, naming file and item.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_json_file(folder / ADAPTER_CONFIG_FILE)
    if not (folder / ADAPTER_FILE).exists() and (folder / PICKLED_ADAPTER_FILE).exists():
        raise CheckpointError(
            f"{folder / PICKLED_ADAPTER_FILE}: is a pickle, which may run any program; save the adapter as safetensors"
        )
    return Checkpoint(folder, CheckpointFormat.SAFETENSORS, config, read_safetensors(folder / ADAPTER_FILE))
