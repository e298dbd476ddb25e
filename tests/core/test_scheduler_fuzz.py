"""Scheduler and key-value shadow together: whatever happens, every request gets its own answer, once."""

from collections import Counter

import pytest

from support.scheduler_fuzz import run_scenario

NUM_PARTS, SCENARIOS_OF_A_PART = 5, 60


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_request_gets_the_answer_it_would_get_alone(part: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(part * SCENARIOS_OF_A_PART, (part + 1) * SCENARIOS_OF_A_PART):
        try:
            happened += run_scenario(seed)
        except Exception as error:
            error.add_note(f"scenario {seed}")
            raise
    # The scenarios would prove little if they avoided the hard cases.
    for what in ("preemptions", "cached tokens", "ended: abort", "ended: error", "ended: length", "ended: stop"):
        assert happened[what] > 0, what
