"""Helpers of every forward pass: buffers for activations, and which rows of a step go on to become logits."""

from __future__ import annotations

import numpy as np

from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops

_SCRATCH_ROWS_STEP = 64
_CACHE_LINE = 64  # bytes
_PAGE_NUMBERS = 1024  # of f32: the smallest pages that systems have
_PART_NUMBERS = 512 * _PAGE_NUMBERS  # made ready at a time: less than a millisecond


class Scratch:
    """Buffers for activations, kept between calls and grown on demand."""

    # Invariant: of `_ready[name]` numbers at the start of a buffer, the system has given the memory.

    def __init__(self) -> None:
        self._buffers: dict[str, F32] = {}
        self._ready: dict[str, int] = {}

    def rows(self, name: str, num_rows: int, size: int) -> F32:
        """[num_rows, size], with whatever the last call left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_rows:
            capacity = -(-num_rows // _SCRATCH_ROWS_STEP) * _SCRATCH_ROWS_STEP
            buffer = self._buffers[name] = _aligned(capacity, size)
            self._ready[name] = 0
        return buffer[:num_rows]

    def prepare(self, name: str, num_rows: int, size: int) -> bool:
        """Has some more of the memory of so many rows ready; whether there is more to be done. What rows held is lost.

        A first touch costs a fault for each page: better while nobody waits. Without memory nothing is done: a step
        that needs it will say so.
        """
        try:
            numbers = self.rows(name, num_rows, size).reshape(-1)
        except MemoryError:
            return False
        start = self._ready[name]
        if start >= len(numbers):
            return False
        numbers[start : start + _PART_NUMBERS : _PAGE_NUMBERS] = 0.0
        self._ready[name] = start + _PART_NUMBERS
        return True

    def heads(self, name: str, num_rows: int, num_heads: int, head_dim: int) -> F32:
        return self.rows(name, num_rows, num_heads * head_dim).reshape(num_rows, num_heads, head_dim)


def _aligned(num_rows: int, size: int) -> F32:
    """[num_rows, size] from the start of a cache line on: vectors of rows then lie in one line each, not in two."""
    memory = np.empty(num_rows * size * 4 + _CACHE_LINE, np.uint8)
    offset = -memory.ctypes.data % _CACHE_LINE
    return memory[offset : offset + num_rows * size * 4].view(np.float32).reshape(num_rows, size)


def num_positions(batch: AttentionBatch) -> int:
    """One more than the last position of the step."""
    lengths = batch.query_start[1:] - batch.query_start[:-1]
    return int((batch.start_position + lengths).max(initial=0))


def positions(batch: AttentionBatch) -> I32:
    """[num_tokens]: the position of every row."""
    counts = np.diff(batch.query_start)
    offsets = np.repeat(batch.start_position - batch.query_start[:-1], counts)
    return (np.arange(batch.query_start[-1]) + offsets).astype(np.int32)


def are_all_rows(logits_rows: I32, num_tokens: int) -> bool:
    return len(logits_rows) == num_tokens and logits_rows.tolist() == list(range(num_tokens))


def weigh(ops: Ops, q: F32, batch: AttentionBatch, kv: KVLayer, scale: float, layer: int) -> None:
    """Count what rows look at, and hear their queries, where that is wanted. Before rows are left out: any may be."""
    if batch.heard is not None:
        batch.heard.add(q, layer)
    for rows in batch.weighed:
        ops.attention_mass(q, batch, kv, scale, rows, layer)


def one_row_each(batch: AttentionBatch, rows: I32) -> AttentionBatch:
    """The same positions of the same sequences, each of the given rows as a sequence of one row."""
    sequence = np.searchsorted(batch.query_start, rows, side="right") - 1
    position = batch.start_position[sequence] + rows - batch.query_start[sequence]
    dropped = batch.start_position - batch.slots
    return AttentionBatch(
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        start_position=position.astype(np.int32),
        block_tables=batch.block_tables.take(sequence, axis=1),
        start_slot=None if batch.start_slot is None else (position - dropped[sequence]).astype(np.int32),
    )
