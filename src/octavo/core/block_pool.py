"""Who holds each KV block: ids and reference counts. No bytes, no tokens, no tree."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.eviction import EvictionPolicy


class BlockPool:
    """Owns all blocks. Each is in exactly one place: free, held (reference count above 0), or idle in the cache."""

    __slots__ = ("_free", "idle", "ref_count")

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.ref_count = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm
        self.idle = policy

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

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks, each with one reference."""
        free, ref_count = self._free, self.ref_count
        assert count <= len(free), f"take({count}) with {len(free)} free blocks"
        if not count:
            return []
        block_ids = free[-count:]
        del free[-count:]
        for block_id in block_ids:
            ref_count[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more reference on each of these different blocks, which are held or idle."""
        ref_count = self.ref_count
        idle = [block_id for block_id in block_ids if not ref_count[block_id]]
        if idle:
            self.idle.remove(idle)
        for block_id in block_ids:
            ref_count[block_id] += 1

    def release_cached(self, block_ids: Sequence[int]) -> None:
        """One reference less on indexed blocks, children first. Those that nobody holds any more become idle."""
        idle = self._drop(block_ids)
        if idle:
            self.idle.add(idle)

    def release_private(self, block_ids: Sequence[int]) -> None:
        """One reference less on blocks that no prefix can hit. Those that nobody holds any more are free."""
        self._free += self._drop(block_ids)

    def put_back(self, block_ids: Sequence[int]) -> None:
        """Make evicted blocks free."""
        self._free += block_ids

    def _drop(self, block_ids: Sequence[int]) -> list[int]:
        ref_count = self.ref_count
        unheld = []
        for block_id in block_ids:
            count = ref_count[block_id] - 1
            assert count >= 0, f"block {block_id} is released more often than it was taken"
            ref_count[block_id] = count
            if not count:
                unheld.append(block_id)
        return unheld
