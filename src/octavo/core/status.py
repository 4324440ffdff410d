"""The ledger of the core: counters that only grow, and a snapshot of where things stand. Counts, no times, no names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.kv_spec import KVGroupSpec
from octavo.core.request_output import FINISH_REASONS


@dataclass(slots=True)
class Counters:
    """Owned by the scheduler. All but `preemptions`, `steps` and `finished` are in tokens.

    Each position of a request is counted once as hit or as computed, whatever happens to it later; what a preemption
    makes run again is `recomputed`, what it finds again in the cache is `restored`.
    """

    # Invariant: computed + recomputed == tokens of all plans that were carried out.
    computed: int = 0
    recomputed: int = 0
    restored: int = 0
    # Invariant: of a request that ended by itself, hit + computed == prompt + output - 1.
    queries: int = 0
    hit: int = 0
    processed: int = 0  # what the executor says that it ran
    prompt: int = 0
    generation: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """A snapshot. free_blocks + cached_blocks + used_blocks == num_blocks, always."""

    num_blocks: int
    block_size: int  # tokens
    kv_bytes_per_block: int
    free_blocks: int
    cached_blocks: int  # held by no request, kept for the next one that has their prefix
    used_blocks: int
    internal_waste_tokens: int  # slots that running requests hold and have not filled
    kv_groups: tuple[KVGroupSpec, ...]
    running: int
    waiting: int
    queries_tokens: int  # prompt tokens looked up in the cache, once a request
    hit_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    restored_tokens: int  # found again in the cache after a preemption; no hits
    processed_tokens: int  # rows that the executor reports: the ledger's truth
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    evicted_blocks: int
    copies: int  # blocks copied in part, for a hit inside a block or for a branch that writes
    finished: Mapping[str, int]  # finish reason -> requests
