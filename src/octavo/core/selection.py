"""Keeping tokens by the attention that they got: when it is counted, when it is chosen, and how many stay.

Each layer and KV head keeps tokens of its own, equally many. What is kept moves to the front of private blocks: a
token's slot is no more its position, but the next token's slot is the same in all of them. The scores and the choice
are the executor's; what it chose is recorded with the request, and goes back into the plan when the text is computed
again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Of each layer and KV head keep `num_kept` slots: the last `num_recent`, and those with the highest scores.

    A score is the attention that a slot got, averaged with its neighbours: `kernel` in all, among those not recent.
    """

    num_kept: int
    num_recent: int
    kernel: int


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    """When `first_drop` tokens are computed, `num_kept` slots stay; then again after each `piece` more (None: never).

    Queries from position `first_weighed` on count. The last `num_recent` tokens stay in any case.
    """

    first_drop: int
    num_kept: int
    num_recent: int
    kernel: int  # neighbours whose scores are averaged; odd
    first_weighed: int
    piece: int | None

    @property
    def num_shared(self) -> int:
        """Others may find these tokens: they have read all before them."""
        return self.first_drop

    @property
    def choice(self) -> Choice:
        return Choice(self.num_kept, self.num_recent, self.kernel)

    def num_drops(self, num_computed: int) -> int:
        """How often something was dropped once `num_computed` tokens are computed."""
        if num_computed < self.first_drop:
            return 0
        return 1 if self.piece is None else (num_computed - self.first_drop) // self.piece + 1

    def num_dropped(self, num_computed: int) -> int:
        """So many tokens of each head are gone then."""
        count = self.num_drops(num_computed)
        return 0 if not count else self.first_drop - self.num_kept + (count - 1) * (self.piece or 0)

    def next_drop(self, num_computed: int) -> int | None:
        """The next number of computed tokens, above this one, at which some are dropped: no row goes beyond it."""
        count = self.num_drops(num_computed)
        if not count:
            return self.first_drop
        return None if self.piece is None else self.first_drop + count * self.piece

    def most_slots(self, num_computed: int, num_tokens: int) -> int:
        """The most slots that are filled on the way from so many computed tokens, and what stays of them, to more."""
        drop = self.next_drop(num_computed)
        before = num_tokens if drop is None else min(num_tokens, drop)
        return max(before - self.num_dropped(num_computed), num_tokens - self.num_dropped(num_tokens))
