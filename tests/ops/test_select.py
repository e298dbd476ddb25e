from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.ops.select import make_ops
from paceline.tensors import Encoding


def test_each_name_gives_the_implementation_that_it_names() -> None:
    assert make_ops("reference", 1).numerics.startswith("reference")
    assert make_ops("auto", None).numerics


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"auto, .*reference.*'cuda'"):
        make_ops("cuda", 1)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_changes_the_form_of_dense_matrices_and_the_numerics(quantization: str) -> None:
    plain, quantised = make_ops("cpu", 1), make_ops("cpu", 1, quantization=quantization)
    assert quantization in quantised.numerics
    assert quantization not in plain.numerics
    assert [plain.linear_form(e) for e in (Encoding.BF16, Encoding.Q8_0)] == ["bf16", "int8-g32"]
    assert [quantised.linear_form(e) for e in (Encoding.BF16, Encoding.Q8_0)] == [f"{quantization}-g32", "int8-g32"]
    assert plain.linear_form(Encoding.BF16, sensitive=True) == "bf16"
    assert quantised.linear_form(Encoding.BF16, sensitive=True) == "int8-g32"


def test_an_unknown_quantization_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="int8 or int4, not 'int5'"):
        make_ops("cpu", 1, quantization="int5")


def test_the_reference_does_not_quantise() -> None:
    with pytest.raises(ConfigError, match="int8 needs the native kernels"):
        make_ops("reference", 1, quantization="int8")
    assert make_ops("reference", 1).linear_form(Encoding.Q4_1) == "f32"
