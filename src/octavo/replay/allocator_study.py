"""Allocators side by side on one load: shares of the memory, requests at once, throughput, and rates at equal latency.

What others have published of such comparisons stands in `PUBLISHED`, to be shown beside. It reads no trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.replay.allocators import Allocator, Contiguous, Lengths, Paged
from octavo.replay.batching import Batching, BatchLimits, Outcome
from octavo.replay.cost_model import CostModel
from octavo.replay.trace import TraceRequest

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BISECTIONS = 7
_RATED = ("ft", "orca max", "orca pow2", "orca oracle", "paged 16", "octavo 16")  # whose rates are looked for

# Kwon et al., "Efficient memory management for large language model serving with PagedAttention", SOSP 2023: figure 2
# (used share of the KV cache: contiguous 20.4% to 38.2%, theirs 96.3%), section 6.2 (request rates at similar latency).
PUBLISHED: dict[str, dict[str, str]] = {
    "ft": {"rate": "up to 22 times less than paged"},
    "orca max": {"used": "20.4%", "rate": "2.7 to 8 times less than paged"},
    "orca pow2": {"used": "26.8%"},
    "orca oracle": {"used": "38.2%", "rate": "1.7 to 2.7 times less than paged"},
    "paged 16": {"used": "96.3%"},
}


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    outcome: Outcome
    rate_at_bound: float | None  # requests/s whose mean latency is within the bound; None: not looked for
    published: dict[str, str]


@dataclass(frozen=True, slots=True)
class LengthLoad:
    """Requests that fit the model. `dropped` were longer than its context."""

    requests: tuple[Lengths, ...]
    dropped: int
    truncated: int


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """too_long: "drop" leaves out what is longer than the context, "truncate" cuts its prompt."""

    max_model_len: int
    max_prompt_len: int | None = None  # longer prompts are left out
    too_long: str = "drop"
    max_requests: int = 1000


def length_load(requests: Iterable[TraceRequest], limits: LengthLimits) -> LengthLoad:
    """Raises ConfigError where no request is left."""
    kept, dropped, truncated, max_model_len = [], 0, 0, limits.max_model_len
    for request in requests:
        prompt, output = request.num_prompt_tokens, max(1, request.num_output_tokens)
        if prompt + output > max_model_len:
            if limits.too_long == "drop" or output >= max_model_len:
                dropped += 1
                continue
            prompt, truncated = max_model_len - output, truncated + 1
        if limits.max_prompt_len is not None and prompt > limits.max_prompt_len:
            dropped += 1
            continue
        kept.append(Lengths(prompt, output))
        if len(kept) >= limits.max_requests:
            break
    if not kept:
        raise ConfigError(
            f"no request of the trace fits {max_model_len} tokens; take a model with a longer context, or --too-long "
            "truncate"
        )
    return LengthLoad(tuple(kept), dropped, truncated)


def allocators(num_slots: int, max_model_len: int, block_sizes: Sequence[int]) -> list[tuple[str, Allocator, bool]]:
    """(name, allocator, whether batches are whole). All are new."""
    made: list[tuple[str, Allocator, bool]] = [
        ("ft", Contiguous("ft", num_slots, "max", max_model_len), True),
        ("orca max", Contiguous("orca max", num_slots, "max", max_model_len), False),
        ("orca pow2", Contiguous("orca pow2", num_slots, "pow2", max_model_len), False),
        ("orca oracle", Contiguous("orca oracle", num_slots, "oracle", max_model_len), False),
    ]
    made += [(f"paged {size}", Paged(num_slots, size), False) for size in block_sizes]
    made.append(("octavo 16", Paged(num_slots, 16, name="octavo 16", spare_per_request=1), False))
    return made


def compare(
    load: LengthLoad, cost: CostModel, num_slots: int, max_model_len: int, *, latency_bound: float | None = None
) -> list[AllocatorRow]:
    """latency_bound: seconds from arrival to end, for each token of the answer, in the mean; None: not looked for."""
    longest = max(one.stored for one in load.requests)
    if num_slots < max(longest + 2 * 256, max_model_len):
        raise ConfigError(
            f"the KV cache has room for {num_slots} tokens, less than one request of {max_model_len}; give more with "
            "--kv-cache-memory, or lower --max-model-len"
        )
    rows = []
    for index, (name, allocator, is_whole) in enumerate(allocators(num_slots, max_model_len, BLOCK_SIZES)):
        limits = BatchLimits(whole_batches=is_whole)
        outcome = Batching(allocator, cost, limits).run(load.requests)
        rate = None
        if latency_bound is not None and name in _RATED:

            def run(rate: float, index: int = index, limits: BatchLimits = limits) -> float:
                fresh = allocators(num_slots, max_model_len, BLOCK_SIZES)[index][1]
                arrivals = poisson(rate, len(load.requests))
                return Batching(fresh, cost, limits).run(load.requests, arrivals).latency_s_per_token

            rate = highest_rate(run, 2 * outcome.requests_per_s, latency_bound)
        rows.append(AllocatorRow(outcome, rate, PUBLISHED.get(name, {})))
    return rows


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Times of arrival, the same for every allocator but for their scale."""
    chance, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(1.0) / rate
        times.append(now)
    return times


def highest_rate(latency: Callable[[float], float], upper: float, bound: float) -> float:
    """By bisection below `upper`; 0 where even a hundredth of it is too much."""
    low, high = upper / 100, upper
    if latency(low) > bound:
        return 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if latency(middle) <= bound else (low, middle)
    return low
