"""LoRA adapters: from their files to packed updates of a model's linear layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.checkpoint.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, open_adapter_folder
from paceline.checkpoint.file_map import drop_pages
from paceline.checkpoint.source import Checkpoint
from paceline.models.decoder import Adapter
from paceline.models.lora_config import LoraConfig, read_lora_config
from paceline.models.registry import adapter_names, interleaves_heads, read_spec
from paceline.models.spec import ModelSpec
from paceline.models.weights import check_names_and_shapes, expected_tensors
from paceline.ops.api import Lora, Ops
from paceline.tensors import RawLora

LINEARS = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The linear layers of :class:`~paceline.models.decoder.DecoderLayer`, and the matrices that each is stacked of."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix that adapters may change: the name that they give it, its place in the model, its shape."""

    name: str
    layer: int
    stem: str
    num_outputs: int
    num_inputs: int

    @property
    def down(self) -> str:
        return f"base_model.model.{self.name}.lora_A.weight"

    @property
    def up(self) -> str:
        return f"base_model.model.{self.name}.lora_B.weight"


def load_adapter(folder: Path, base: Checkpoint, ops: Ops) -> Adapter:
    """Pack an adapter for the model in ``base``.

    Raises CheckpointError, naming file and item, for a configuration that asks for something that is not supported, and
    for tensors that are missing, unknown or of the wrong shape.
    """
    files = open_adapter_folder(folder)
    config = read_lora_config(str(folder / ADAPTER_CONFIG_FILE), files.metadata)
    spec = read_spec(base)
    matrices = _matrices(base, spec)
    changed = set(config.changed({matrix.name: matrix.layer for matrix in matrices}))
    _check_tensors(files, config, [matrix for matrix in matrices if matrix.name in changed])
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads} if interleaves_heads(base) else {}
    by_place = {(matrix.layer, matrix.stem): matrix for matrix in matrices}
    layers: list[dict[str, Lora]] = []
    for layer in range(spec.num_layers):
        packed: dict[str, Lora] = {}
        for name, stems in LINEARS.items():
            updates, first = [], 0
            for matrix in (by_place[layer, stem] for stem in stems):
                if matrix.name in changed:
                    updates.append(_raw_lora(files, config, matrix, first, heads.get(matrix.stem)))
                first += matrix.num_outputs
            if updates:
                packed[name] = ops.pack_lora(updates)
        layers.append(packed)
    for tensor in files.tensors.values():
        drop_pages(tensor.data)
    return Adapter(tuple(layers))


def _matrices(base: Checkpoint, spec: ModelSpec) -> list[_Matrix]:
    names = adapter_names(base)
    shapes = expected_tensors(spec, names)
    matrices = []
    for layer in range(spec.num_layers):
        for stem in (stem for stems in LINEARS.values() for stem in stems):
            name = names.stems[stem].format(i=layer)
            matrices.append(_Matrix(name, layer, stem, *shapes[f"{name}.weight"]))
    return matrices


def _check_tensors(files: Checkpoint, config: LoraConfig, changed: list[_Matrix]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for matrix in changed:
        rank = config.rank_of(matrix.name)
        expected |= {matrix.down: (rank, matrix.num_inputs), matrix.up: (matrix.num_outputs, rank)}
    what = f"{files.path / ADAPTER_FILE}: the tensors do not fit the model and {ADAPTER_CONFIG_FILE}"
    check_names_and_shapes(files.tensors, expected, what)


def _raw_lora(files: Checkpoint, config: LoraConfig, matrix: _Matrix, first: int, interleaved: int | None) -> RawLora:
    """The update of a matrix whose outputs begin at ``first``; ``interleaved`` is the number of heads, if they are."""
    up = files.tensors[matrix.up]
    if interleaved is not None:
        # The elements i and i + d/2 of each head come side by side, as in the model's own matrix.
        halves = up.data.reshape(interleaved, 2, -1, up.row_bytes)
        up = replace(up, data=np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1))
    return RawLora(first, files.tensors[matrix.down], up, config.scale_of(matrix.name))
