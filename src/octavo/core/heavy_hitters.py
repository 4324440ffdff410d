"""H2O: each head keeps the tokens that got most attention so far, and its most recent ones (Zhang et al. 2023).

"H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv:2306.14048. The attention
that a token got is summed over all queries since it came (summed, as in the paper, not averaged), and over the query
heads of a KV head. In the paper one token goes at each step; here `piece` go at once, at fixed places of the text, from
its beginning on: so the memory of a prompt is bounded as well, and steps need not be single tokens.

Positions: a kept key keeps the rotation of its place in the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.selection import SelectionPlan
from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """All in tokens: whenever budget + piece are held, the budget stays, its last `recent` in any case."""

    budget: int = 1024
    recent: int = 512
    piece: int = 256

    def __str__(self) -> str:
        return f"h2o:{self.budget},{self.recent},{self.piece}"

    def __post_init__(self) -> None:
        if not 1 <= self.recent < self.budget:
            raise InvalidRequestError(
                f"the recent tokens of H2O are {self.recent}; they must be at least 1 and below the budget of "
                f"{self.budget} tokens, which they are part of"
            )
        if self.piece < 1:
            raise InvalidRequestError(f"the piece of H2O is {self.piece}; it must be at least 1")

    def loss(self, block_size: int) -> str:  # noqa: ARG002
        return (
            f"nothing comes from the prefix cache: with kv_policy {self} the attention of every token is counted, and "
            f"a text keeps {self.budget} to {self.budget + self.piece} tokens in each head"
        )

    def most_slots(self, block_size: int) -> int:  # noqa: ARG002
        return self.budget + self.piece

    def plan(self, block_size: int, num_prompt_tokens: int = 0, most_tokens: int | None = None) -> SelectionPlan | None:  # noqa: ARG002
        """None for a text that never fills what may be held."""
        first_drop = self.budget + self.piece
        if most_tokens is not None and most_tokens <= first_drop:
            return None
        return SelectionPlan(
            first_drop=first_drop,
            num_kept=self.budget,
            num_recent=self.recent,
            kernel=1,
            first_weighed=0,
            piece=self.piece,
        )
