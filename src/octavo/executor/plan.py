"""The plan of the KV cache: how many blocks, and how long a request may be. Pure; nothing is allocated here.

It does not know the model: sizes come from the KV spec, the memory that is there from `memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv_spec import KVSpec
from octavo.errors import MemoryBudgetError
from octavo.executor.memory import check_budget, default_budget_bytes


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What the KV cache is made of, and what it may hold: decided before a byte of it is allocated."""

    spec: KVSpec
    num_blocks: int
    max_model_len: int
    step_tokens: int = 1  # most tokens of a step: so many more a window holds while a prompt is computed
    most_slots: int | None = None  # tokens that a text keeps at most, by a policy that drops some; None: all
    degraded: tuple[str, ...] = ()  # what was asked for and is not had

    @property
    def kv_bytes(self) -> int:
        return self.spec.pool_bytes(self.num_blocks)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds, where no block is shared or half full: with windows, of one text.

        Windows alone hold a text of any length; then it is `max_model_len`, or what many such texts would be.
        """
        spec = self.spec
        if not spec.has_windows:
            return self.num_blocks // len(spec.groups) * spec.block_size
        limit = self.num_blocks * spec.block_size if spec.growing_bytes_per_token else self.max_model_len
        return spec.longest_tokens(self.num_blocks, self.step_tokens, limit)

    @property
    def max_request_tokens(self) -> int:
        """The longest request that can be served."""
        if self.most_slots is not None and self.most_slots <= self.kv_tokens:
            return self.max_model_len
        return min(self.max_model_len, self.kv_tokens)

    @property
    def max_concurrency(self) -> float:
        """Requests of the whole context that fit at once, none sharing anything, one of them in its largest step."""
        slots = _fewest(self.max_model_len, self.most_slots)
        held = self.spec.blocks_for_tokens(slots)
        in_step = self.spec.blocks_for_tokens(slots, self.step_tokens) - held
        return (self.num_blocks - in_step) / held

    def __str__(self) -> str:
        what = f"{self.num_blocks} blocks x {self.spec.block_size}{self._group_words()} = {self.kv_tokens} tokens"
        return (
            f"KV cache: {what} ({self.kv_bytes} bytes), maximum concurrency for {self.max_model_len} tokens per "
            f"request: {self.max_concurrency:.2f}x"
        )

    def _group_words(self) -> str:
        groups, size = self.spec.groups, self.spec.block_size
        # of what grows and of windows: a sequence has one block of a tail
        padding = size * sum(group.padding_bytes_per_token for group in groups if group.kind != "tail")
        if len(groups) == 1 and not self.spec.has_windows:
            return ""
        num_tails = sum(group.kind == "tail" for group in groups)
        num_windows = sum(group.window is not None for group in groups) - num_tails
        windows = f", {num_windows} with a window" if num_windows else ""
        windows += f", {num_tails} for blocks that fill" if num_tails else ""
        unused = f", {padding / ((len(groups) - num_tails) * self.spec.bytes_per_block):.1%} padding" if padding else ""
        return f" in {len(groups)} KV groups{windows}{unused}" if len(groups) > 1 else " in 1 KV group with a window"


def plan_cache(
    spec: KVSpec,
    *,
    budget_bytes: int | None,
    available_bytes: int,
    asked_model_len: int | None,
    longest_context: int,
    step_tokens: int = 1,
    most_slots: int | None = None,
    degraded: tuple[str, ...] = (),
) -> CachePlan:
    """How many blocks, and how long a request may be, in steps of at most `step_tokens`. Pure.

    Raises MemoryBudgetError for a budget that is not there, and for one that cannot hold a request of the length that
    was asked for. Where no length was asked for, it is what fits, and `degraded` says so.
    """
    wanted_len = longest_context if asked_model_len is None else asked_model_len
    if budget_bytes is None:
        needed_bytes = spec.pool_bytes(spec.blocks_for_tokens(_fewest(wanted_len, most_slots), step_tokens))
        budget_bytes = default_budget_bytes(available_bytes, needed_bytes)
    else:
        check_budget(budget_bytes, available_bytes)
    num_blocks = spec.num_blocks(budget_bytes)
    needed = spec.blocks_for_tokens(_fewest(wanted_len, most_slots), step_tokens)
    if needed <= num_blocks:
        return CachePlan(spec, num_blocks, wanted_len, step_tokens, most_slots, degraded)
    arithmetic = (
        f"one request of {wanted_len} tokens needs {needed} blocks ({spec.pool_bytes(needed)} bytes), but the KV cache "
        f"has {num_blocks} blocks ({budget_bytes} bytes)"
    )
    fitting_len = spec.longest_tokens(num_blocks, step_tokens, wanted_len)
    if asked_model_len is not None or fitting_len < spec.block_size:
        raise MemoryBudgetError(
            f"{arithmetic}; raise --kv-cache-memory to at least {spec.pool_bytes(needed)}, or lower --max-model-len to "
            f"at most {fitting_len}"
        )
    lowered = f"max_model_len is {fitting_len} instead of the model's {wanted_len}: {arithmetic}"
    return CachePlan(spec, num_blocks, fitting_len, step_tokens, most_slots, (*degraded, lowered))


def _fewest(num_tokens: int, most_slots: int | None) -> int:
    return num_tokens if most_slots is None else min(num_tokens, most_slots)
