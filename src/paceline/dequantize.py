"""From a checkpoint's encodings to float32, exactly as the formats define them.

The block layouts are those of GGML (``ggml-common.h`` in github.com/ggml-org/ggml). The order of the float32
operations follows its reference decoders, so the results are equal to theirs bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from paceline.tensors import Array, Encoding, FloatArray, RawTensor

# Elements decoded at a time: the temporaries stay in the processor's cache and never grow with the tensor.
CHUNK_ELEMENTS = 1 << 18


def to_float32(tensor: RawTensor) -> FloatArray:
    """The tensor's numbers as a new float32 array of shape ``tensor.shape``."""
    encoding = tensor.encoding
    decode, block = DECODERS[encoding]
    blocks = tensor.data.view(block)
    out = np.empty((len(blocks), encoding.block_elements), np.float32)
    step = CHUNK_ELEMENTS // encoding.block_elements
    with np.errstate(invalid="ignore"):  # an infinite scale makes a NaN, and that is the answer
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            decode(blocks[part], out[part])
    return out.reshape(tensor.shape)


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """The values of bfloat16 numbers given as their bits; a new array of the same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even; a new array of the same shape.

    Values beyond the largest finite bfloat16 become infinite. A NaN stays one: it is made quiet, so that dropping its
    low bits cannot turn it into an infinity.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16).reshape(values.shape)


def _plain(blocks: Array, out: FloatArray) -> None:
    out[:] = blocks["x"]


def _bf16(blocks: Array, out: FloatArray) -> None:
    out[:] = bf16_to_float32(blocks["x"])


def _q4_0(blocks: Array, out: FloatArray) -> None:
    np.multiply(_nibbles(blocks["q"]).view(np.int8) - np.int8(8), _scale(blocks["d"]), out=out)


def _q4_1(blocks: Array, out: FloatArray) -> None:
    np.multiply(_nibbles(blocks["q"]), _scale(blocks["d"]), out=out)
    out += _scale(blocks["m"])


def _q5_0(blocks: Array, out: FloatArray) -> None:
    np.multiply(_five_bits(blocks).view(np.int8) - np.int8(16), _scale(blocks["d"]), out=out)


def _q5_1(blocks: Array, out: FloatArray) -> None:
    np.multiply(_five_bits(blocks), _scale(blocks["d"]), out=out)
    out += _scale(blocks["m"])


def _q8_0(blocks: Array, out: FloatArray) -> None:
    np.multiply(blocks["q"], _scale(blocks["d"]), out=out)


def _q4_k(blocks: Array, out: FloatArray) -> None:
    low_high = np.array([0, 4], np.uint8)[:, None]
    quants = (blocks["q"].reshape(-1, 4, 1, 32) >> low_high) & np.uint8(15)
    _scale_groups(blocks, quants.reshape(-1, 8, 32), out)


def _q5_k(blocks: Array, out: FloatArray) -> None:
    low_high = np.array([0, 4], np.uint8)[:, None]
    quants = ((blocks["q"].reshape(-1, 4, 1, 32) >> low_high) & np.uint8(15)).reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = (blocks["h"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    _scale_groups(blocks, quants | (fifth << np.uint8(4)), out)


def _q6_k(blocks: Array, out: FloatArray) -> None:
    low_high = np.array([0, 4], np.uint8)[:, None]
    low = ((blocks["q"].reshape(-1, 2, 1, 64) >> low_high) & np.uint8(15)).reshape(-1, 2, 4, 32)
    pairs = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks["h"].reshape(-1, 2, 1, 32) >> pairs) & np.uint8(3)
    quants = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scales = _scale(blocks["d"]) * blocks["s"].astype(np.float32)
    np.multiply(quants.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


def _scale(half: Array) -> FloatArray:
    """One number for each block, as a column."""
    return half.astype(np.float32)[:, None]


def _nibbles(packed: Array) -> npt.NDArray[np.uint8]:
    """[n, 16] bytes to [n, 32]: the low halves are elements 0..15, the high halves 16..31."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _five_bits(blocks: Array) -> npt.NDArray[np.uint8]:
    """[n, 32]: four bits from the nibbles, the fifth of element i from bit i of the word ``h``."""
    fifth = np.unpackbits(blocks["h"], axis=1, bitorder="little")
    return _nibbles(blocks["q"]) | (fifth << np.uint8(4))


def _scale_groups(blocks: Array, quants: Array, out: FloatArray) -> None:
    """Eight groups of 32, each with a six-bit scale and minimum: d * scale * q - dmin * minimum.

    The twelve bytes of ``s`` hold, for groups 0..3, scales then minima in their low six bits; the upper two bits of
    those bytes belong to groups 4..7, whose low four bits share the last four bytes.
    """
    first, second, third = blocks["s"][:, 0:4], blocks["s"][:, 4:8], blocks["s"][:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    d = _scale(blocks["d"]) * scales.astype(np.float32)
    m = _scale(blocks["m"]) * minima.astype(np.float32)
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants, d[:, :, None], out=groups)
    groups -= m[:, :, None]


Decoder = Callable[[Array, FloatArray], None]

# For each encoding its decoder ([n] blocks to [n, block_elements]) and the fields of one block as they lie in the file.
DECODERS: dict[Encoding, tuple[Decoder, np.dtype[np.void]]] = {
    Encoding.F32: (_plain, np.dtype([("x", "<f4", (1,))])),
    Encoding.F16: (_plain, np.dtype([("x", "<f2", (1,))])),
    Encoding.BF16: (_bf16, np.dtype([("x", "<u2", (1,))])),
    Encoding.Q4_0: (_q4_0, np.dtype([("d", "<f2"), ("q", "u1", (16,))])),
    Encoding.Q4_1: (_q4_1, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))])),
    Encoding.Q5_0: (_q5_0, np.dtype([("d", "<f2"), ("h", "u1", (4,)), ("q", "u1", (16,))])),
    Encoding.Q5_1: (_q5_1, np.dtype([("d", "<f2"), ("m", "<f2"), ("h", "u1", (4,)), ("q", "u1", (16,))])),
    Encoding.Q8_0: (_q8_0, np.dtype([("d", "<f2"), ("q", "i1", (32,))])),
    Encoding.Q4_K: (_q4_k, np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", (12,)), ("q", "u1", (128,))])),
    Encoding.Q5_K: (
        _q5_k,
        np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", (12,)), ("h", "u1", (32,)), ("q", "u1", (128,))]),
    ),
    Encoding.Q6_K: (_q6_k, np.dtype([("q", "u1", (128,)), ("h", "u1", (64,)), ("s", "i1", (16,)), ("d", "<f2")])),
}
