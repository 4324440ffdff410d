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
    degraded: tuple[str, ...] = ()  # what was asked for and is not had

    @property
    def kv_bytes(self) -> int:
        return self.spec.pool_bytes(self.num_blocks)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds, where no block is shared or half full."""
        return self.num_blocks // len(self.spec.groups) * self.spec.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of the whole context that fit at once, none sharing anything."""
        return self.num_blocks / self.spec.blocks_for_tokens(self.max_model_len)

    def __str__(self) -> str:
        return (
            f"KV cache: {self.num_blocks} blocks x {self.spec.block_size} = {self.kv_tokens} tokens ({self.kv_bytes} "
            f"bytes), maximum concurrency for {self.max_model_len} tokens per request: {self.max_concurrency:.2f}x"
        )


def plan_cache(
    spec: KVSpec,
    *,
    budget_bytes: int | None,
    available_bytes: int,
    asked_model_len: int | None,
    longest_context: int,
    degraded: tuple[str, ...] = (),
) -> CachePlan:
    """How many blocks, and how long a request may be. Pure.

    Raises MemoryBudgetError for a budget that is not there, and for one that cannot hold a request of the length that
    was asked for. Where no length was asked for, it is what fits, and `degraded` says so.
    """
    wanted_len = longest_context if asked_model_len is None else asked_model_len
    if budget_bytes is None:
        needed_bytes = spec.pool_bytes(spec.blocks_for_tokens(wanted_len))
        budget_bytes = default_budget_bytes(available_bytes, needed_bytes)
    else:
        check_budget(budget_bytes, available_bytes)
    num_blocks = spec.num_blocks(budget_bytes)
    needed = spec.blocks_for_tokens(wanted_len)
    if needed <= num_blocks:
        return CachePlan(spec, num_blocks, wanted_len, degraded)
    arithmetic = (
        f"one request of {wanted_len} tokens needs {needed} blocks ({spec.pool_bytes(needed)} bytes), but the KV cache "
        f"has {num_blocks} blocks ({budget_bytes} bytes)"
    )
    fitting_len = num_blocks // len(spec.groups) * spec.block_size
    if asked_model_len is not None or fitting_len < spec.block_size:
        raise MemoryBudgetError(
            f"{arithmetic}; raise --kv-cache-memory to at least {spec.pool_bytes(needed)}, or lower --max-model-len to "
            f"at most {fitting_len}"
        )
    lowered = f"max_model_len is {fitting_len} instead of the model's {wanted_len}: {arithmetic}"
    return CachePlan(spec, num_blocks, fitting_len, (*degraded, lowered))
