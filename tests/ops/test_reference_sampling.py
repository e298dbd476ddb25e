"""What the reference keeps after its filters, compared with the definition id for id."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ops.reference_sampling import kept_ids
from support import sampling_oracle as oracle

quarters = st.lists(st.integers(-30, 30).map(lambda n: n / 4), min_size=1, max_size=40)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    logits=quarters,
    top_k=st.sampled_from([0, 1, 2, 5, 39, 1000]),
    top_p=st.sampled_from([0.0, 0.25, 0.6, 0.9, 0.9921875, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_the_kept_ids_are_those_of_the_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    z = np.array(logits, np.float32) - np.float32(max(logits))
    kept = kept_ids(z, top_k, top_p, float(np.float32(min_p)))
    assert set(kept.tolist()) == set(oracle.kept_tokens(logits, 1.0, top_k, top_p, float(np.float32(min_p))))


def test_the_search_for_the_top_p_set_goes_on_as_far_as_it_must() -> None:
    rng = np.random.default_rng(3)
    for spread in (0.01, 0.5, 3.0):
        logits = rng.normal(0, spread, 6000).astype(np.float32)
        z = logits - logits.max()
        for top_p in (0.01, 0.3, 0.75, 0.99):
            expected = oracle.kept_tokens(z.tolist(), 1.0, top_p=top_p)
            assert sorted(kept_ids(z, 0, top_p, 0.0).tolist()) == sorted(expected)
