"""Who holds each KV block: ids and reference counts. No bytes, no tokens, no tree."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.eviction import EvictionPolicy


class BlockPool:
    """Owns all blocks. Each is in exactly one place: free, held (reference count above 0), or idle in the cache.

    A block belongs to a KV group from when it is taken until it is free again.
    """

    __slots__ = ("_free", "_group_of", "_num_held", "_num_taken", "idle", "ref_count")

    def __init__(self, num_blocks: int, policy: EvictionPolicy, num_groups: int = 1) -> None:
        self.ref_count = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm
        self.idle = policy
        # One entry per KV group, kept up where there are several: blocks that are held, and blocks that are not free.
        self._num_held = [0] * num_groups
        self._num_taken = [0] * num_groups
        self._group_of = [0] * num_blocks if num_groups > 1 else []

    @property
    def num_blocks(self) -> int:
        return len(self.ref_count)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones and idle cached ones."""
        return len(self._free) + len(self.idle)

    @property
    def free_block_ids(self) -> Sequence[int]:
        return tuple(self._free)

    def group_of(self, block_id: int) -> int:
        """The KV group of a block that is not free."""
        return self._group_of[block_id] if self._group_of else 0

    def counts(self, group: int) -> tuple[int, int]:
        """Blocks of a KV group that are held, and that are idle."""
        if not self._group_of:
            return self.num_blocks - self.num_available, len(self.idle)
        return self._num_held[group], self._num_taken[group] - self._num_held[group]

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each: equally many for each KV group, group after group."""
        free, ref_count = self._free, self.ref_count
        assert count <= len(free), f"take({count}) with {len(free)} free blocks"
        if not count:
            return []
        block_ids = free[-count:]
        del free[-count:]
        for block_id in block_ids:
            ref_count[block_id] = 1
        if self._group_of:
            each, rest = divmod(count, len(self._num_held))
            assert not rest, f"{count} blocks for {len(self._num_held)} KV groups"
            group_of = self._group_of
            for group in range(len(self._num_held)):
                for block_id in block_ids[group * each : (group + 1) * each]:
                    group_of[block_id] = group
                self._num_taken[group] += each
                self._num_held[group] += each
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more reference on each of these different blocks, which are held or idle."""
        ref_count = self.ref_count
        idle = [block_id for block_id in block_ids if not ref_count[block_id]]
        if idle:
            self.idle.remove(idle)
            self._count(self._num_held, idle, 1)
        for block_id in block_ids:
            ref_count[block_id] += 1

    def release_cached(self, block_ids: Sequence[int]) -> None:
        """One reference less on indexed blocks, children first. Those that nobody holds any more become idle."""
        idle = self._drop(block_ids)
        if idle:
            self.idle.add(idle)

    def release_passed(self, block_ids: Sequence[int]) -> None:
        """As `release_cached`, for blocks that a window has passed: of the idle ones they go first."""
        idle = self._drop(block_ids)
        if idle:
            self.idle.add_passed(idle)

    def release_private(self, block_ids: Sequence[int]) -> None:
        """One reference less on blocks that no prefix can hit. Those that nobody holds any more are free."""
        self.put_back(self._drop(block_ids))

    def put_back(self, block_ids: Sequence[int]) -> None:
        """Make evicted blocks free."""
        self._free += block_ids
        self._count(self._num_taken, block_ids, -1)

    def _drop(self, block_ids: Sequence[int]) -> list[int]:
        ref_count = self.ref_count
        unheld = []
        for block_id in block_ids:
            count = ref_count[block_id] - 1
            assert count >= 0, f"block {block_id} is released more often than it was taken"
            ref_count[block_id] = count
            if not count:
                unheld.append(block_id)
        self._count(self._num_held, unheld, -1)
        return unheld

    def _count(self, counts: list[int], block_ids: Sequence[int], change: int) -> None:
        group_of = self._group_of
        if group_of:
            for block_id in block_ids:
                counts[group_of[block_id]] += change
