"""From a checkpoint's tensors to a model that runs. Every tensor is accounted for before any is packed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from paceline.checkpoint.file_map import drop_pages
from paceline.checkpoint.source import Checkpoint
from paceline.errors import CheckpointError
from paceline.models.decoder import Decoder, DecoderLayer
from paceline.models.registry import read_spec, tensor_names
from paceline.models.rope import build_rope_table
from paceline.models.spec import ModelSpec, TensorNames
from paceline.ops.api import Linear, Ops, RopeTable
from paceline.tensors import FloatArray, RawTensor

NAMES_SHOWN = 8
"""Tensors that an error message names before it only counts the rest."""


def load_model(checkpoint: Checkpoint, ops: Ops, *, max_positions: int) -> Decoder:
    """Pack a checkpoint's weights for ``ops``; sequences may be up to ``max_positions`` tokens long.

    Raises CheckpointError for what :func:`~paceline.models.registry.read_spec` refuses, and for tensors that are
    missing, unknown or of the wrong shape.
    """
    spec, names = read_spec(checkpoint), tensor_names(checkpoint)
    _check_tensors(checkpoint, spec, names)
    packer = _Packer(spec, names, checkpoint.tensors, ops)
    # The largest matrix first, while there is little else in memory: it stands there twice for a moment.
    head = packer.linear(["embedding" if spec.tied_head else "head"], sensitive=True)
    ropes = {rope: build_rope_table(rope, max_positions) for rope in {layer.rope for layer in spec.layers}}
    return Decoder(
        spec=spec,
        ops=ops,
        embedding=ops.pack_embedding(packer.raw("embedding.weight")),
        layers=tuple(packer.layer(i, ropes[layer.rope]) for i, layer in enumerate(spec.layers)),
        final_norm=packer.norm("final_norm"),
        head=head,
    )


def head_tensor(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """The name of the output head's matrix in the file."""
    return _file_name(tensor_names(checkpoint), "embedding.weight" if spec.tied_head else "head.weight")


def has_dense_matrices(checkpoint: Checkpoint) -> bool:
    """Whether any matrix is stored number by number, and not in blocks that share a scale."""
    return any(len(tensor.shape) > 1 and tensor.encoding.block_elements == 1 for tensor in checkpoint.tensors.values())


def count_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in the weights that the model uses; a tied head counts once."""
    expected = expected_tensors(read_spec(checkpoint), tensor_names(checkpoint))
    return sum(math.prod(shape) for shape in expected.values())


def expected_tensors(spec: ModelSpec, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the model needs, by its name in the file."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    model: dict[str, tuple[int, ...]] = {
        "embedding.weight": (spec.vocab_size, hidden),
        "final_norm.weight": (hidden,),
    }
    if not spec.tied_head:
        model["head.weight"] = (spec.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "q.weight": (q_width, hidden),
        "k.weight": (kv_width, hidden),
        "v.weight": (kv_width, hidden),
        "out.weight": (hidden, q_width),
        "ffn_norm.weight": (hidden,),
        "gate.weight": (ffn, hidden),
        "up.weight": (ffn, hidden),
        "down.weight": (hidden, ffn),
    }
    if spec.qk_norm:
        layer |= {"q_norm.weight": (spec.head_dim,), "k_norm.weight": (spec.head_dim,)}
    if spec.sandwich_norms:
        layer |= {"post_attn_norm.weight": (hidden,), "post_ffn_norm.weight": (hidden,)}
    if spec.qkv_bias:
        layer |= {"q.bias": (q_width,), "k.bias": (kv_width,), "v.bias": (kv_width,)}
    if spec.out_bias:
        layer |= {"out.bias": (hidden,)}
    if spec.ffn_bias:
        layer |= {"gate.bias": (ffn,), "up.bias": (ffn,), "down.bias": (hidden,)}

    expected = {_file_name(names, name): shape for name, shape in model.items()}
    for i in range(spec.num_layers):
        expected |= {_file_name(names, name, i): shape for name, shape in layer.items()}
    return expected


def _file_name(names: TensorNames, name: str, layer: int = 0) -> str:
    stem, kind = name.rsplit(".", 1)
    return f"{names.stems[stem].format(i=layer)}.{kind}"


def check_names_and_shapes(
    tensors: Mapping[str, RawTensor], expected: Mapping[str, tuple[int, ...]], what: str, unused: Sequence[str] = ()
) -> None:
    """Raises CheckpointError unless ``tensors`` are those that are expected, and others only of ``unused`` names.

    ``what`` begins the message; ``unused`` are regular expressions.
    """
    missing = [name for name in expected if name not in tensors]
    unknown = [
        name for name in tensors if name not in expected and not any(re.fullmatch(pattern, name) for pattern in unused)
    ]
    misshapen = [
        f"{name} is {tensors[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = [
        f"{problem}: {_shorten(items)}"
        for problem, items in (("missing", missing), ("unknown", unknown), ("of the wrong shape", misshapen))
        if items
    ]
    if problems:
        raise CheckpointError(f"{what}; " + "; ".join(problems))


def _check_tensors(checkpoint: Checkpoint, spec: ModelSpec, names: TensorNames) -> None:
    unused = list(names.unused)
    if spec.tied_head:
        unused.append(re.escape(_file_name(names, "head.weight")))
    what = f"{checkpoint.path}: the tensors do not fit the architecture {spec.architecture}"
    check_names_and_shapes(checkpoint.tensors, expected_tensors(spec, names), what, unused)


def _shorten(items: list[str]) -> str:
    shown = ", ".join(items[:NAMES_SHOWN])
    return shown if len(items) <= NAMES_SHOWN else f"{shown} and {len(items) - NAMES_SHOWN} more"


class _Packer:
    """Finds the tensors of a checkpoint by our names and hands them to the operations."""

    def __init__(self, spec: ModelSpec, names: TensorNames, tensors: Mapping[str, RawTensor], ops: Ops) -> None:
        self._spec = spec
        self._names = names
        self._tensors = tensors
        self._ops = ops

    def raw(self, name: str, layer: int = 0) -> RawTensor:
        return self._tensors[_file_name(self._names, name, layer)]

    def norm(self, stem: str, layer: int = 0) -> FloatArray:
        return self._ops.vector(self.raw(f"{stem}.weight", layer), self._spec.norm_offset)

    def linear(self, stems: list[str], layer: int = 0, *, bias: bool = False, sensitive: bool = False) -> Linear:
        """The stems' matrices stacked, and their biases."""
        weights = [self.raw(f"{stem}.weight", layer) for stem in stems]
        biases = [self.raw(f"{stem}.bias", layer) for stem in stems] if bias else []
        packed = self._ops.pack_linear(weights, biases, sensitive=sensitive)
        for weight in weights:
            drop_pages(weight.data)
        return packed

    def layer(self, i: int, rope: RopeTable) -> DecoderLayer:
        spec = self._spec
        return DecoderLayer(
            rope=rope,
            window=spec.layers[i].window,
            attn_norm=self.norm("attn_norm", i),
            qkv=self.linear(["q", "k", "v"], i, bias=spec.qkv_bias),
            q_norm=self.norm("q_norm", i) if spec.qk_norm else None,
            k_norm=self.norm("k_norm", i) if spec.qk_norm else None,
            out=self.linear(["out"], i, bias=spec.out_bias),
            post_attn_norm=self.norm("post_attn_norm", i) if spec.sandwich_norms else None,
            ffn_norm=self.norm("ffn_norm", i),
            gate_up=self.linear(["gate", "up"], i, bias=spec.ffn_bias),
            down=self.linear(["down"], i, bias=spec.ffn_bias),
            post_ffn_norm=self.norm("post_ffn_norm", i) if spec.sandwich_norms else None,
        )
