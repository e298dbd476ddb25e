"""One sequence, as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.block_pool import BlockKey
from paceline.types import TokenRules


@dataclass(slots=True, eq=False)
class Request:
    """A sequence from its arrival to its end; a request for n choices is n of these.

    The first group is given by the caller; the second belongs to the scheduler alone.

    Attributes:
        tokens: prompt, then output as it is chosen.
        priority: smaller runs first.
        cache_salt: only requests with the same salt share prefix blocks.
        adapter: the adapter's name, None for the model itself; only requests with the same one share prefix blocks.

        arrival: seconds on the scheduler's clock, when it was added.
        number: its place in the order of arrival; decides between requests of one priority.
        admission: its place in the order of admissions, new for each running life; the last is preempted first.
        num_computed: tokens whose keys and values are in the store.
        slot: its place in the runner, None while it waits.
        blocks: store blocks by position.
        block_keys: what identifies the content of its full blocks, as far as anyone asked.
        num_published: leading blocks that the prefix cache has been told of.
        num_scored: prompt positions whose log-probabilities were delivered.
        num_likely: output tokens in an unbroken row up to the last, that an early stop counts. A preemption keeps it.
        num_cached_tokens: prompt tokens saved by the prefix cache at the first admission; None before it.
        times_passed_over: steps in which a later request was admitted before this one.
    """

    request_id: str
    tokens: list[int]
    rules: TokenRules
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None

    arrival: float = field(init=False, default=0.0)
    number: int = field(init=False, default=0)
    admission: int = field(init=False, default=0)
    num_prompt: int = field(init=False)
    num_computed: int = field(init=False, default=0)
    slot: int | None = field(init=False, default=None)
    blocks: list[int] = field(init=False, default_factory=list)
    block_keys: list[BlockKey] = field(init=False, default_factory=list)
    num_published: int = field(init=False, default=0)
    num_scored: int = field(init=False, default=0)
    num_likely: int = field(init=False, default=0)
    num_cached_tokens: int | None = field(init=False, default=None)
    times_passed_over: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def resume(self, output: list[int], *, num_scored: int, num_likely: int, num_cached_tokens: int | None) -> None:
        """Go on after ``output``, which another scheduler has brought forth. To be called before it is added."""
        self.tokens += output
        self.num_scored = num_scored
        self.num_likely = num_likely
        self.num_cached_tokens = num_cached_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens still to compute; 1 for a sequence that generates."""
        return len(self.tokens) - self.num_computed
