from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sample.history import TokenCounts

tokens = st.lists(st.integers(0, 30), max_size=80)


@settings(derandomize=True, deadline=None)
@given(prompt=tokens, output=tokens, cut=st.integers(0, 80))
def test_counting_along_the_way_equals_counting_at_once(prompt: list[int], output: list[int], cut: int) -> None:
    at_once = TokenCounts(prompt, output)
    along = TokenCounts(prompt, output[:cut])
    for token in output[cut:]:
        along.add(token)
    assert along.ids.tolist() == at_once.ids.tolist()
    assert along.counts.tolist() == at_once.counts.tolist()
    assert dict(zip(along.ids.tolist(), along.counts.tolist(), strict=True)) == {
        token: output.count(token) for token in {*prompt, *output}
    }


def test_an_empty_sequence_has_no_tokens() -> None:
    assert TokenCounts([], []).ids.tolist() == []
