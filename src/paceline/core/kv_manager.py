"""Blocks for sequences, and the prefix cache: which blocks already hold what a sequence would have to compute."""

from __future__ import annotations

import hashlib
from array import array

from paceline.core.block_pool import BlockKey, BlockPool
from paceline.core.request import Request


class KvManager:
    """Gives blocks of ``block_size`` tokens to requests and takes them back.

    The prefix cache knows full blocks only. A block's key is a SHA-256 over its tokens and the key of the block before
    it; the chain begins with the request's salt and adapter. So equal keys mean equal whole prefixes of requests that
    may share. A block is published after the step that filled it was committed, never before; from then on it is never
    written.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks held by requests."""
        return self._pool.num_used

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody that the prefix cache keeps until their room is needed."""
        return self._pool.num_cached

    def used_blocks(self) -> list[int]:
        """For diagnosis only: looks at every block."""
        return self._pool.used_blocks()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> tuple[list[int], int]:
        """The blocks that already hold the longest cached prefix, and its tokens: at least one is left to compute.

        Requests for prompt log-probabilities match nothing: those come from computing the prompt.
        """
        blocks: list[int] = []
        if self.enable_prefix_caching and request.rules.prompt_logprobs is None:
            for index in range((len(request.tokens) - 1) // self.block_size):
                block = self._pool.find(self._key(request, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def start(self, request: Request, reserve: int) -> bool:
        """Give a request the blocks of all its tokens, cached ones where possible, and set ``num_computed``.

        All or nothing: returns False if fewer than ``reserve`` blocks would be left.
        """
        cached, num_tokens = self.match(request)
        missing = self.blocks_for(len(request.tokens)) - len(cached)
        # Cached blocks that nobody holds count as available, but not while they are needed for their content.
        revived = sum(self._pool.is_cached(block) for block in cached)
        if missing + reserve > self._pool.num_available - revived:
            return False
        self._pool.acquire(cached)
        request.blocks = cached + self._pool.allocate(missing)
        request.num_computed = num_tokens
        request.num_published = len(cached)
        return True

    def grow(self, request: Request, num_tokens: int, ahead: int) -> tuple[int, ...] | None:
        """Append the blocks that ``num_tokens`` tokens need, and ``ahead`` more if any are needed and these are there.

        Returns what was appended, or None (and appends nothing) if there is not even what is needed.
        """
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing <= 0:
            return ()
        available = self._pool.num_available
        if missing > available:
            return None
        blocks = self._pool.allocate(missing + ahead if missing + ahead <= available else missing)
        request.blocks += blocks
        return tuple(blocks)

    def publish(self, request: Request) -> None:
        """Let others find the request's blocks that are full of computed tokens."""
        if not self.enable_prefix_caching:
            return
        for index in range(request.num_published, request.num_computed // self.block_size):
            self._pool.register(request.blocks[index], self._key(request, index))
            request.num_published = index + 1

    def free(self, request: Request) -> None:
        """Take back all blocks; published ones stay in the cache. The request has then nothing computed."""
        self._pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0

    def reset(self) -> None:
        """Empty the prefix cache. Running requests keep their blocks."""
        self._pool.forget()

    def _key(self, request: Request, index: int) -> BlockKey:
        """The key of the request's full block number ``index``; computed once, for tokens never change."""
        keys = request.block_keys
        while len(keys) <= index:
            first = len(keys) * self.block_size
            parent = keys[-1].digest if keys else _root_digest(request)
            content = parent + array("i", request.tokens[first : first + self.block_size]).tobytes()
            keys.append(BlockKey(hashlib.sha256(content).digest(), content))
        return keys[index]


def _root_digest(request: Request) -> bytes:
    """What the chain of a request's keys begins with: different for whoever must not share."""
    # The tags keep one from being taken for the other, or for the content of a block.
    content = b"cache_salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
    if request.adapter is not None:
        name = request.adapter.encode("utf-8", "surrogatepass")
        content = b"adapter:" + hashlib.sha256(name).digest() + content
    return hashlib.sha256(content).digest()
