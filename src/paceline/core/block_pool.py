"""The blocks of the key-value store: which are free, which are held and how often, which could be used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class BlockKey(NamedTuple):
    """What identifies the content of a full block: ``digest`` is found by, ``content`` is compared on a hit."""

    digest: bytes
    content: bytes


class BlockPool:
    """Block ids 0..num_blocks-1. Each is in exactly one of three states:

    * *free*: nobody holds it and its content is worthless;
    * *used*: held by one or more sequences, counted;
    * *cached*: held by nobody, but registered under a key, so that it can be acquired again or, if need be, evicted.

    Every operation costs a constant amount of work for each block it names.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The block freed last is handed out first: its memory is the warmest. At the start, the lowest id.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[int, BlockKey] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out: the free ones, and the cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def used_blocks(self) -> list[int]:
        """For diagnosis only: looks at every block."""
        return [block for block, holders in enumerate(self._holders) if holders]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting the cached ones released longest ago if the free ones do not suffice."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks were asked for, {self.num_available} are available")
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            del self._by_digest[self._keys.pop(block).digest]
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def find(self, key: BlockKey) -> int | None:
        """The block registered under a key, used or cached; None if there is none or its content differs."""
        block = self._by_digest.get(key.digest)
        if block is None or self._keys[block].content != key.content:
            return None
        return block

    def acquire(self, blocks: Sequence[int]) -> None:
        """Become one more holder of blocks that :meth:`find` returned."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Stop holding a sequence's blocks, given in order of position.

        The last one goes first: of blocks released together the deepest is evicted first, for a prefix is of no use
        without what stands before it.
        """
        for block in reversed(blocks):
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is released, but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, key: BlockKey) -> None:
        """Let a used block be found by its key.

        Does nothing if another block has the digest already: two sequences may compute the same content at the same
        time, and the second one's block stays private.
        """
        if self._holders[block] == 0:
            raise ValueError(f"block {block} is registered, but nobody holds it")
        if key.digest not in self._by_digest and block not in self._keys:
            self._keys[block] = key
            self._by_digest[key.digest] = block

    def forget(self) -> None:
        """Drop every key: cached blocks become free, used ones stay with their holders and cannot be found."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._keys.clear()
        self._by_digest.clear()
