"""SnapKV: at the end of a prompt, each head keeps what the prompt's last queries looked at (Li et al. 2024).

"SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469. The attention of the last `window`
tokens of the prompt to those before them, averaged over these queries and over the query heads of a KV head, is
smoothed by an average over `kernel` neighbours; the highest stay, and the window itself. (The paper offers a maximum
instead of the average as well.) What comes after the prompt is all kept. Until the choice the prompt is held whole.

Positions: a kept key keeps the rotation of its place in the text, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.selection import SelectionPlan
from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class SnapKV:
    """All in tokens: `budget` of a prompt stay, its last `window` among them."""

    budget: int = 1024
    window: int = 64
    kernel: int = 5

    def __str__(self) -> str:
        return f"snapkv:{self.budget},{self.window},{self.kernel}"

    def __post_init__(self) -> None:
        if not 1 <= self.window < self.budget:
            raise InvalidRequestError(
                f"the window of SnapKV is {self.window}; it must be at least 1 and below the budget of {self.budget} "
                "tokens, which it is part of"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise InvalidRequestError(f"the kernel of SnapKV is {self.kernel}; it must be odd and at least 1")

    def loss(self, block_size: int) -> str:  # noqa: ARG002
        return (
            f"with kv_policy {self} a text keeps {self.budget} tokens of its prompt in each head once it is computed; "
            f"the prompt's last {self.window} tokens are always computed, and answers are not found again"
        )

    def most_slots(self, block_size: int) -> None:  # noqa: ARG002
        """Until the choice, a prompt is held whole."""
        return

    def plan(self, block_size: int, num_prompt_tokens: int = 0, most_tokens: int | None = None) -> SelectionPlan | None:  # noqa: ARG002
        """None for a prompt within the budget, or with one token of output: nothing goes before others read."""
        ends = most_tokens is not None and most_tokens <= num_prompt_tokens
        if num_prompt_tokens <= self.budget or ends:
            return None
        return SelectionPlan(
            first_drop=num_prompt_tokens,
            num_kept=self.budget,
            num_recent=self.window,
            kernel=self.kernel,
            first_weighed=num_prompt_tokens - self.window,
            piece=None,
        )
