"""The pool against a simple model of it, under random sequences of operations."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.block_pool import BlockKey, BlockPool


def key(name: object) -> BlockKey:
    return BlockKey(str(name).encode(), f"content of {name}".encode())


class PoolMachine(RuleBasedStateMachine):
    """``held`` are the lists that holders were given; ``order`` are the cached blocks, the next to be evicted first."""

    @initialize(num_blocks=st.integers(1, 12))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[list[int]] = []
        self.named: dict[int, BlockKey] = {}
        self.order: list[int] = []
        self.num_names = 0

    def holders(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_available))
        num_evicted = max(count - self.pool.num_free, 0)
        blocks = self.pool.allocate(count)
        evicted, self.order = self.order[:num_evicted], self.order[num_evicted:]
        for block in evicted:
            assert self.pool.find(self.named.pop(block)) is None
        assert len(set(blocks)) == count
        assert not set(blocks) & (set(self.holders()) | set(self.named))
        self.held.append(blocks)

    @rule()
    def more_than_there_is_is_refused_and_changes_nothing(self) -> None:
        with pytest.raises(ValueError, match="available"):
            self.pool.allocate(self.pool.num_available + 1)

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.named)), min_size=1, unique=True))
        found = [self.pool.find(self.named[block]) for block in blocks]
        assert found == blocks
        self.pool.acquire(blocks)
        self.order = [block for block in self.order if block not in blocks]
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        left = self.holders()
        self.order += [block for block in reversed(blocks) if not left[block] and block in self.named]

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), reuse=st.booleans())
    def register(self, data: st.DataObject, reuse: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders())))
        self.num_names += 1
        name = data.draw(st.sampled_from(list(self.named.values()))) if reuse and self.named else key(self.num_names)
        self.pool.register(block, name)
        if name not in self.named.values():
            self.named.setdefault(block, name)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.named.clear()
        self.order.clear()

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        held = set(self.holders())
        assert self.pool.used_blocks() == sorted(held)
        assert self.pool.num_used == len(held)
        assert self.pool.num_cached == len(self.order)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.num_blocks
        assert self.pool.num_available == self.pool.num_free + self.pool.num_cached
        assert all(self.pool.is_cached(block) == (block in self.order) for block in range(self.pool.num_blocks))
        assert not held & set(self.order)

    @invariant()
    def exactly_what_was_registered_is_found(self) -> None:
        assert all(self.pool.find(name) == block for block, name in self.named.items())
        assert self.pool.find(key("never registered")) is None


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def test_the_lowest_blocks_are_handed_out_first() -> None:
    assert BlockPool(4).allocate(3) == [0, 1, 2]


def test_the_cached_block_released_longest_ago_is_evicted_first_and_the_deeper_of_equals() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.register(block, key(block))
    pool.release(new)
    pool.release(old)
    pool.acquire(new)
    pool.release(new)
    assert [pool.allocate(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, key("kept"))
    pool.release([block])
    pool.allocate(1)
    assert pool.find(key("kept")) == block


def test_a_digest_with_other_content_is_not_a_hit() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, BlockKey(b"digest", b"content"))
    assert pool.find(BlockKey(b"digest", b"other content")) is None


def test_the_second_block_of_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, key("same"))
    pool.register(second, key("same"))
    assert pool.find(key("same")) == first
    pool.release([second])
    assert pool.num_free == 1


def test_releasing_or_registering_a_block_that_nobody_holds_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is released"):
        pool.release([0])
    with pytest.raises(ValueError, match="block 0 is registered"):
        pool.register(0, key("x"))
