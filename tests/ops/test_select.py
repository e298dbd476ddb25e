from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.ops.select import make_ops


def test_each_name_gives_the_implementation_that_it_names() -> None:
    assert make_ops("reference", 1).numerics.startswith("reference")
    assert make_ops("auto", None).numerics


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"auto, .*reference.*'cuda'"):
        make_ops("cuda", 1)
