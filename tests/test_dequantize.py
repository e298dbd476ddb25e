from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from paceline.dequantize import CHUNK_ELEMENTS, bf16_to_float32, float32_to_bf16, to_float32
from paceline.tensors import Encoding, FloatArray, RawTensor
from support.raw_tensors import random_tensor

ENCODINGS = pytest.mark.parametrize("encoding", Encoding, ids=lambda encoding: encoding.label)


def oracle(tensor: RawTensor) -> FloatArray:
    kind = gguf.GGMLQuantizationType[tensor.encoding.label]
    stored = {Encoding.F32: np.float32, Encoding.F16: np.float16}.get(tensor.encoding, np.uint8)
    with np.errstate(invalid="ignore"):
        values = gguf.quants.dequantize(tensor.data.view(stored), kind)
    return values.astype(np.float32).reshape(tensor.shape)


def bits(values: FloatArray) -> np.ndarray:
    assert values.dtype == np.float32
    return values.view(np.uint32)


@ENCODINGS
def test_every_encoding_decodes_to_the_bits_of_the_gguf_package(encoding: Encoding) -> None:
    tensor = random_tensor((7, 768), encoding, np.random.default_rng(1))
    np.testing.assert_array_equal(bits(to_float32(tensor)), bits(oracle(tensor)))


@ENCODINGS
def test_arbitrary_bytes_decode_as_in_the_gguf_package(encoding: Encoding) -> None:
    # Infinite and NaN scales, every scale and minimum, every quant.
    data = np.random.default_rng(2).integers(0, 256, 512 * encoding.block_bytes, np.uint8)
    tensor = RawTensor("any", (2, 256 * encoding.block_elements), encoding, data)
    np.testing.assert_array_equal(to_float32(tensor), oracle(tensor))


@ENCODINGS
def test_a_tensor_of_several_chunks_decodes_as_one(encoding: Encoding) -> None:
    rows = CHUNK_ELEMENTS // 512 * 2 + 3
    tensor = random_tensor((rows, 512), encoding, np.random.default_rng(3))
    np.testing.assert_array_equal(bits(to_float32(tensor)), bits(oracle(tensor)))


@ENCODINGS
def test_rows_of_a_matrix_decode_as_in_the_whole(encoding: Encoding) -> None:
    tensor = random_tensor((9, 512), encoding, np.random.default_rng(4))
    whole = to_float32(tensor)
    for first, last in [(0, 9), (2, 5), (8, 9), (4, 4)]:
        np.testing.assert_array_equal(bits(to_float32(tensor.rows(first, last))), bits(whole[first:last]))


@ENCODINGS
def test_the_result_is_a_new_writable_array(encoding: Encoding) -> None:
    tensor = random_tensor((2, 256), encoding, np.random.default_rng(5))
    tensor.data.flags.writeable = False
    before = tensor.data.copy()
    to_float32(tensor)[:] = 7
    np.testing.assert_array_equal(tensor.data, before)


def test_data_at_an_odd_address_decodes() -> None:
    tensor = random_tensor((4, 256), Encoding.Q4_1, np.random.default_rng(6))
    shifted = np.empty(len(tensor.data) + 1, np.uint8)[1:]
    shifted[:] = tensor.data
    np.testing.assert_array_equal(
        to_float32(RawTensor("shifted", tensor.shape, tensor.encoding, shifted)), to_float32(tensor)
    )


def test_every_bfloat16_number_survives_the_way_to_float32_and_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = bf16_to_float32(every)
    back = float32_to_bf16(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(back[number], every[number])
    assert np.isnan(bf16_to_float32(back[~number])).all()


def test_rounding_to_bfloat16_is_torchs() -> None:
    # Random bits, and both sides of every tie near some exponents: to even, into the next exponent, into infinity.
    rng = np.random.default_rng(7)
    some = rng.integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32)
    upper = rng.integers(0, 1 << 16, 5_000, np.uint32) << 16
    ties = np.concatenate(
        [upper | 0x7FFF, upper | 0x8000, upper | 0x8001, np.array([0x7F7FFFFF, 0xFF7F8000], np.uint32)]
    )
    values = np.concatenate([some, ties]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(float32_to_bf16(values), expected)


def test_a_nan_stays_a_nan_whichever_of_its_bits_are_set() -> None:
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_float32(float32_to_bf16(nans))).all()


def test_bfloat16_keeps_the_shape_and_takes_strided_input() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    there = float32_to_bf16(values)
    assert there.shape == (4, 2, 3)
    np.testing.assert_array_equal(bf16_to_float32(there), values)
    assert float32_to_bf16(np.float32(1.0).reshape(())).shape == ()
