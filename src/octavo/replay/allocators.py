"""Ways to hand out the memory of a KV cache to requests whose length nobody knows: contiguous ones, and by blocks.

Counted in slots, one token each. They know lengths, no time and no order. Contiguous ones set the whole of a request's
room aside when it starts; the buddy system rounds it up to a power of two and may find no hole that is large enough
(Knowlton, "A fast storage allocator", CACM 8, 1965). Kwon et al. (SOSP 2023, section 6.1) describe the three kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: tokens of its prompt, and of the answer that it will get."""

    prompt: int
    output: int

    @property
    def stored(self) -> int:
        """Tokens whose K and V are kept in the end: the last one is never run."""
        return self.prompt + self.output - 1


class Allocator(Protocol):
    """`start` and `grow` are all or nothing. A held request is named by a number."""

    @property
    def name(self) -> str: ...

    @property
    def num_slots(self) -> int:
        """Slots of the whole memory."""
        ...

    def start(self, number: int, lengths: Lengths, num_tokens: int) -> int | None:
        """Room for a request that has so many tokens now; the slots that are set aside, None where there is no room."""
        ...

    def grow(self, number: int, num_tokens: int) -> int | None:
        """Room for one token more, beyond what is set aside; the slots that are set aside then, None: there is none."""
        ...

    def release(self, number: int) -> None: ...


class BuddySystem:
    """Free room as runs of 2**k slots. The memory's size need not be a power of two."""

    def __init__(self, num_slots: int, largest: int) -> None:
        top = max(0, (largest - 1).bit_length())
        self._free: list[set[int]] = [set() for _ in range(top + 1)]
        start = 0
        for order in range(top, -1, -1):  # as many of the largest as fit, then what is left over
            while start + (1 << order) <= num_slots:
                self._free[order].add(start)
                start += 1 << order
        # Invariant: a run is joined with its buddy only inside the piece that it was cut from.
        self._orders: dict[int, int] = {}
        self._top_of: dict[int, int] = {at: order for order, free in enumerate(self._free) for at in free}

    def take(self, size: int) -> int | None:
        """The start of a run of at least `size` slots, or None."""
        order = max(0, (size - 1).bit_length())
        found = next((level for level in range(order, len(self._free)) if self._free[level]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].discard(start)
        while found > order:
            found -= 1
            self._free[found].add(start + (1 << found))
        self._orders[start] = order
        return start

    def give_back(self, start: int) -> None:
        order = self._orders.pop(start)
        while self._top_of.get(start) != order:
            piece = max(at for at in self._top_of if at <= start)
            buddy = piece + ((start - piece) ^ (1 << order))
            if buddy not in self._free[order]:
                break
            self._free[order].discard(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


class Contiguous:
    """Sets room aside for the longest answer that it expects: `reserve` tells it from the lengths."""

    def __init__(self, name: str, num_slots: int, kind: str, max_model_len: int) -> None:
        """kind: "max" (to the model's whole context), "pow2" (the answer's length, to a power of two) or "oracle"."""
        self.name = name
        self.num_slots = num_slots
        self._kind = kind
        self._max_model_len = max_model_len
        self._buddies = BuddySystem(num_slots, max_model_len)
        self._starts: dict[int, int] = {}

    def start(self, number: int, lengths: Lengths, num_tokens: int) -> int | None:  # noqa: ARG002
        size = self._size(lengths)
        at = self._buddies.take(size)
        if at is None:
            return None
        self._starts[number] = at
        return size

    def grow(self, number: int, num_tokens: int) -> int | None:
        raise AssertionError(f"request {number} has {num_tokens} tokens, more than what was set aside for it")

    def release(self, number: int) -> None:
        self._buddies.give_back(self._starts.pop(number))

    def _size(self, lengths: Lengths) -> int:
        if self._kind == "max":
            return self._max_model_len
        if self._kind == "oracle":
            return lengths.stored
        answer = 1 << max(0, (lengths.output - 1).bit_length())
        return min(self._max_model_len, lengths.prompt + answer)


class Paged:
    """Blocks as they are needed. A request starts when the tokens that it has fit, and some blocks stay free."""

    def __init__(self, num_slots: int, block_size: int, *, name: str = "", spare_per_request: int = 0) -> None:
        """spare_per_request: blocks that stay free for each request that runs, as octavo's scheduler has it; 0: one
        block in a hundred of the whole memory stays free, as vLLM has it.
        """
        self.name = name or f"paged {block_size}"
        self.block_size = block_size
        self.num_slots = num_slots
        self._spare_per_request = spare_per_request
        self._num_free = num_slots // block_size
        self._watermark = 0 if spare_per_request else self._num_free // 100
        self._held: dict[int, int] = {}

    def start(self, number: int, lengths: Lengths, num_tokens: int) -> int | None:  # noqa: ARG002
        needed = -(-num_tokens // self.block_size)
        spare = max(self._watermark, self._spare_per_request * len(self._held))
        if needed + (spare if self._held else 0) > self._num_free:
            return None
        self._num_free -= needed
        self._held[number] = needed
        return needed * self.block_size

    def grow(self, number: int, num_tokens: int) -> int | None:  # noqa: ARG002
        if not self._num_free:
            return None
        self._num_free -= 1
        self._held[number] += 1
        return self._held[number] * self.block_size

    def release(self, number: int) -> None:
        self._num_free += self._held.pop(number)
