"""How PyTorch's caching allocators hand out a device's memory: what is reserved for what is allocated.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings, which the allocators of other
devices follow. `tests/accelerator/device/memory.h` holds them a second time, written apart, as this model's oracle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

ROUNDING_BYTES = 512


class Sizes(NamedTuple):
    """Bytes in the rules.

    Attributes:
        largest_small: Up to here blocks come from the pool of small ones.
        small_segment: A segment of that pool.
        large_segment: A segment of the other.
        least_own_segment: From here on a block gets a segment of its own size.
        own_rounding: To a multiple of this.
    """

    largest_small: int = 1 << 20
    small_segment: int = 2 << 20
    large_segment: int = 20 << 20
    least_own_segment: int = 10 << 20
    own_rounding: int = 2 << 20


SIZES = Sizes()


class LimitExceededError(Exception):
    """The allocator has no room, even after it has handed back what is unused."""


def rounded(num_bytes: int, unit: int = ROUNDING_BYTES) -> int:
    """The next multiple of the unit."""
    return -(-num_bytes // unit) * unit


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment.

    Attributes:
        segment: Which one: segments count up.
        offset: Where in it the block begins.
        size: Its bytes.
        is_free: Whether it waits in a pool.
        before: The block that ends where it begins, in the segment.
        after: The block that begins where it ends.
    """

    segment: int
    offset: int
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


_Free = tuple[int, int, int, Block]


class CachingAllocator:
    """Blocks of segments that are taken whole, split, merged again, and kept when they are unused.

    >>> memory = CachingAllocator()
    >>> block = memory.allocate(3 << 20)
    >>> memory.allocated_bytes >> 20, memory.reserved_bytes >> 20
    (3, 20)

    Args:
        limit_bytes: The most that can be reserved.

    Attributes:
        allocated_bytes: Of all blocks in use.
        reserved_bytes: Of all segments.
        most_allocated_bytes: The most so far.
        most_reserved_bytes: The most so far.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes, self.sizes = limit_bytes, SIZES
        self.allocated_bytes = self.reserved_bytes = 0
        self.most_allocated_bytes = self.most_reserved_bytes = 0
        self._num_segments = 0
        self._small: list[_Free] = []
        self._large: list[_Free] = []

    def allocate(self, num_bytes: int) -> Block | None:
        """A block for that many bytes: the tightest free one; None for no bytes.

        Raises:
            LimitExceededError: None is left.
        """
        if not num_bytes:
            return None
        size = rounded(num_bytes)
        pool = self._pool(size)
        at = bisect_left(pool, size, key=lambda entry: entry[0])
        if at < len(pool):
            block = pool.pop(at)[3]
            block.is_free = False
        else:
            block = self._segment(size)
        rest = block.size - size
        if rest >= ROUNDING_BYTES if size <= self.sizes.largest_small else rest > self.sizes.largest_small:
            self._split(pool, block, size)
        self.allocated_bytes += block.size
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """The block is unused from here on."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        pool = self._pool(block.size)
        if (before := block.before) is not None and before.is_free:
            _leave(pool, before)
            block = _joined(before, block)
        if (after := block.after) is not None and after.is_free:
            _leave(pool, after)
            block = _joined(block, after)
        block.is_free = True
        insort(pool, _entry(block))

    def give_up_unused(self) -> None:
        """Hands back the segments of which nothing is in use."""
        for pool in (self._small, self._large):
            whole = [e for e in pool if e[3].before is None and e[3].after is None]
            self.reserved_bytes -= sum(size for size, *_ in whole)
            pool[:] = [e for e in pool if e[3].before is not None or e[3].after is not None]

    def _pool(self, size: int) -> list[_Free]:
        return self._small if size <= self.sizes.largest_small else self._large

    def _segment(self, size: int) -> Block:
        if size <= self.sizes.largest_small:
            whole = self.sizes.small_segment
        else:
            is_shared = size < self.sizes.least_own_segment
            whole = self.sizes.large_segment if is_shared else rounded(size, self.sizes.own_rounding)
        if self.limit_bytes is not None:
            if self.reserved_bytes + whole > self.limit_bytes:
                self.give_up_unused()
            if self.reserved_bytes + whole > self.limit_bytes:
                raise LimitExceededError
        self.reserved_bytes += whole
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._num_segments += 1
        return Block(self._num_segments, 0, whole)

    def _split(self, pool: list[_Free], block: Block, size: int) -> None:
        rest = Block(block.segment, block.offset + size, block.size - size, is_free=True, before=block)
        rest.after = block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        insort(pool, _entry(rest))


def _entry(block: Block) -> _Free:
    return block.size, block.segment, block.offset, block


def _joined(block: Block, after: Block) -> Block:
    """The block, grown by the one after it."""
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
    return block


def _leave(pool: list[_Free], block: Block) -> None:
    del pool[bisect_left(pool, (block.size, block.segment, block.offset), key=lambda entry: entry[:3])]
