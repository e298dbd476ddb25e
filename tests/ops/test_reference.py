from __future__ import annotations

import os
import subprocess
import sys

from threadpoolctl import threadpool_info

from paceline.ops.reference import ReferenceOps

PROGRAM = """
import hashlib, numpy as np
from paceline.ops.reference import ReferenceOps
from paceline.tensors import Encoding, RawTensor
rng = np.random.default_rng(1)
weight, x = rng.standard_normal((5000, 700), np.float32), rng.standard_normal((3, 700), np.float32)
ops = ReferenceOps()
raw = RawTensor("w", weight.shape, Encoding.F32, weight.reshape(-1).view(np.uint8))
print(hashlib.sha256(ops.linear(x, ops.pack_linear([raw]))).hexdigest())
"""


def test_blas_is_kept_to_one_thread() -> None:
    ReferenceOps()
    assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {1}


def test_bits_do_not_depend_on_the_threads_that_blas_is_offered() -> None:
    outputs = set()
    for threads in ("1", "2", "4"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_numerics_name_what_may_change_a_bit() -> None:
    words = ReferenceOps().numerics.split()
    assert words[0] == "reference-f32/1"
    assert words[1].startswith("numpy-")
