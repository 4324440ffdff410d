"""StreamingLLM: a text keeps its first tokens, the attention sinks, and its most recent ones (Xiao et al. 2023).

"Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453. What is kept is a function of positions
alone: whole blocks are dropped, each time the text has grown to the same places, whatever ran beside it. So a text that
is computed again drops the same.

Positions: a kept key keeps the rotation of its place in the text, and so does a query. (In the paper keys are rotated
by their place in the cache, which allows texts longer than the model's context; here the context remains the limit.)
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StreamingLLM:
    """All three are rounded up to whole blocks.

    From num_recent to num_recent + num_dropped_at_once recent tokens are read: larger pieces allow longer steps.
    """

    num_sinks: int = 4
    num_recent: int = 1024
    num_dropped_at_once: int = 256

    def __str__(self) -> str:
        return f"streaming:{self.num_sinks},{self.num_recent},{self.num_dropped_at_once}"

    def __post_init__(self) -> None:
        for name in ("num_sinks", "num_recent", "num_dropped_at_once"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} of StreamingLLM is {getattr(self, name)}; it must be at least 1")

    def loss(self, block_size: int) -> str:
        """What it takes from the prefix cache."""
        drops = self.plan(block_size)
        recent = drops.capacity - drops.num_sinks
        return (
            f"prefix caching ends after {drops.num_sinks} tokens: with kv_policy {self} a text keeps these and its "
            f"last {recent - drops.piece} to {recent}"
        )

    def most_slots(self, block_size: int) -> int:
        return self.plan(block_size).capacity

    def plan(self, block_size: int, num_prompt_tokens: int = 0, most_tokens: int | None = None) -> DropPlan:  # noqa: ARG002
        """What that comes to in blocks; the same for every text."""
        sinks, recent, piece = (
            -(-count // block_size) * block_size
            for count in (self.num_sinks, self.num_recent, self.num_dropped_at_once)
        )
        return DropPlan(sinks, sinks + recent + piece, piece)


@dataclass(frozen=True, slots=True)
class DropPlan:
    """Whenever `capacity` slots are filled, the `piece` tokens behind the sinks go. All are multiples of a block."""

    num_sinks: int
    capacity: int  # most slots that are ever filled
    piece: int

    @property
    def num_shared(self) -> int:
        """Others may find these tokens: they have read all before them, and stay."""
        return self.num_sinks

    def most_slots(self, num_computed: int, num_tokens: int) -> int:  # noqa: ARG002
        """The most slots that are filled on the way to so many tokens."""
        return min(num_tokens, self.capacity)

    def num_dropped(self, num_computed: int) -> int:
        """So many tokens are gone once `num_computed` tokens are computed."""
        if num_computed < self.capacity:
            return 0
        return ((num_computed - self.capacity) // self.piece + 1) * self.piece

    def next_drop(self, num_computed: int) -> int:
        """The next number of computed tokens, above this one, at which some are dropped: no row goes beyond it."""
        return self.capacity + self.num_dropped(num_computed)
