"""Raw checkpoint tensors for tests, in every encoding."""

from __future__ import annotations

import gguf
import numpy as np

from paceline.tensors import Array, Encoding, FloatArray, RawTensor

_K_QUANT_SCALES = {Encoding.Q4_K: (0, 4), Encoding.Q5_K: (0, 4), Encoding.Q6_K: (208, 210)}
"""Bytes of a block that hold its float16 scales, for the encodings that ``gguf`` can read but not write."""


def encode(values: FloatArray, encoding: Encoding, name: str = "tensor") -> RawTensor:
    """The values rounded to an encoding that ``gguf`` can write."""
    kind = gguf.GGMLQuantizationType[encoding.label]
    packed = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    return RawTensor(name, values.shape, encoding, packed.reshape(-1).view(np.uint8))


def random_tensor(shape: tuple[int, ...], encoding: Encoding, rng: np.random.Generator) -> RawTensor:
    """Numbers of about unit size; for the K-quants, random blocks with small scales."""
    if encoding not in _K_QUANT_SCALES:
        return encode(rng.standard_normal(shape, np.float32), encoding)
    num_blocks = int(np.prod(shape)) // encoding.block_elements
    blocks = rng.integers(0, 256, (num_blocks, encoding.block_bytes), np.uint8)
    first, last = _K_QUANT_SCALES[encoding]
    scales = rng.uniform(0.001, 0.002, (num_blocks, (last - first) // 2)).astype("<f2")
    blocks[:, first:last] = scales.view(np.uint8)
    return RawTensor("tensor", shape, encoding, blocks.reshape(-1))


def decoded(tensor: RawTensor) -> Array:
    """The tensor's numbers in float64, by the ``gguf`` package."""
    kind = gguf.GGMLQuantizationType[tensor.encoding.label]
    rows = tensor.data.reshape(*tensor.shape[:-1], tensor.row_bytes)
    return gguf.quants.dequantize(rows, kind).astype(np.float64).reshape(tensor.shape)
