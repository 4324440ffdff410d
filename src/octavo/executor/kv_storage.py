"""The bytes of the KV cache: one pool of blocks, and each layer's view of it.

It does not know which request owns a block, nor what the bytes of a block mean (`kv_formats` does).
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np

from octavo.core.kv_spec import KVSpec
from octavo.errors import MemoryBudgetError
from octavo.executor.kv_scales import KVScales
from octavo.kernels.ops import U8, KVLayer
from octavo.kv_formats.hadamard import TURNED_FORMATS

_NAN_BYTE = 0xFF  # all bits set is a NaN in every floating-point format
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name
_AHEAD_BYTES = 256 << 20  # of blocks that were used: an idle engine has so much ready
_PART_BYTES = 2 << 20  # of it at a time, a huge page: a new request waits no longer than for that


class KVStorage:
    """An anonymous mapping of exactly `spec.pool_bytes(num_blocks)` bytes.

    The kernel gives the memory page by page as blocks are first written, in huge pages where it has them: blocks far
    from any that was used cost nothing. Pages start at multiples of 4096 bytes, so the pool is aligned for every
    instruction set.
    """

    # Invariant: allocated_bytes, read from the buffer, equals spec.pool_bytes(num_blocks).
    # Invariant: all blocks that were marked as used are among the first `_num_used`.
    # Invariant: the pages before `_ready_bytes` were asked for; those behind may or may not be there.

    def __init__(
        self, spec: KVSpec, num_blocks: int, *, scales: KVScales | None = None, fill_with_nan: bool = False
    ) -> None:
        """fill_with_nan: start with NaN in every slot, so that a read of a slot that was never written shows.

        Raises ConfigError for scales of layers of another shape.
        """
        assert num_blocks >= 1
        self.spec = spec
        self.num_blocks = num_blocks
        num_bytes = spec.pool_bytes(num_blocks)
        try:
            self._mapping = _private_mapping(num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryBudgetError(
                f"no address space for a KV cache of {num_bytes} bytes ({error}); lower --kv-cache-memory"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise_huge_pages()
        self.pool: U8 = np.frombuffer(self._mapping, np.uint8)  # [num_blocks * bytes_per_block]
        self._num_used = self._ready_bytes = 0
        if fill_with_nan:
            self.pool.fill(_NAN_BYTE)
        layers = _layers(spec, self.pool)
        self.layers = layers if scales is None else scales.applied(layers)
        self.scales_bytes = 0 if scales is None else scales.num_bytes  # beside the pool

    @property
    def allocated_bytes(self) -> int:
        return self.pool.nbytes

    def mark_used(self, block_id: int) -> None:
        """Of blocks that a text was given together, the last: they are had in ascending order."""
        self._num_used = max(self._num_used, block_id + 1)

    def prepare(self) -> bool:
        """Has a little more memory ready behind the blocks that are used; whether there is more to be done.

        A first touch costs a fault for each page, on virtual machines milliseconds: better while nobody waits. No byte
        changes. Where the system cannot do it, pages come as blocks are written.
        """
        end = min(self._num_used * self.spec.bytes_per_block + _AHEAD_BYTES, self.allocated_bytes)
        if self._ready_bytes >= end:
            return False
        count = min(_PART_BYTES, self.allocated_bytes - self._ready_bytes)
        try:
            self._mapping.madvise(_POPULATE_WRITE, self._ready_bytes, count)
        except (AttributeError, OSError):
            self._ready_bytes = self.allocated_bytes  # it is not asked again
            return False
        self._ready_bytes += count
        return self._ready_bytes < end

    def fill_block_with_nan(self, block_id: int) -> None:
        """For tests: what was in the block is gone, and whoever reads it without writing first gets NaN."""
        block_bytes = self.spec.bytes_per_block
        self.pool[block_id * block_bytes : (block_id + 1) * block_bytes] = _NAN_BYTE

    def _advise_huge_pages(self) -> None:
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return  # a kernel without huge pages: the same bytes in small ones


def _private_mapping(num_bytes: int) -> mmap.mmap:
    # The default is shared, and shared memory gets no huge pages.
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


def _layers(spec: KVSpec, pool: U8) -> tuple[KVLayer, ...]:
    """Each layer's view, by layer index; inside a block, layers follow each other as the group lists them."""
    found: dict[int, KVLayer] = {}
    tails: dict[int, KVLayer] = {}
    for group_index, group in enumerate(spec.groups):
        layer_bytes = group.layer_bytes_per_token * spec.block_size
        for place, layer_index in enumerate(group.layer_indices):
            of_kind = tails if group.kind == "tail" else found
            assert layer_index not in of_kind
            of_kind[layer_index] = KVLayer(
                pool=pool,
                block_bytes=spec.bytes_per_block,
                layer_offset=place * layer_bytes,
                block_size=spec.block_size,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                kv_format=group.kv_format,
                group=group_index,
                kind=group.kind,
                is_turned=group.kv_format in TURNED_FORMATS and group.kind == "pair",
            )
    assert sorted(found) == list(range(len(found)))
    return tuple(replace(found[index], tail=tails.get(index)) for index in range(len(found)))
