"""The ledger of the core: counters that only grow, and a snapshot of where things stand. Counts, no times, no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.block_manager import BlockManager
from octavo.core.kv_spec import KVGroupSpec
from octavo.core.request import Request
from octavo.core.request_output import FINISH_REASONS


@dataclass(slots=True)
class Counters:
    """Owned by the scheduler. All but `preemptions`, `steps` and `finished` are in tokens.

    Each position of a request is counted once as hit or as computed, whatever happens to it later; what a preemption
    makes run again is `recomputed`, what it finds again in the cache is `restored`.
    """

    # Invariant: computed + recomputed + failed == tokens of all plans that were carried out.
    computed: int = 0
    recomputed: int = 0
    failed: int = 0  # in rows that the executor refused or could not finish
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

    def enter(self, request: Request, *, is_query: bool) -> None:
        """The request runs for the first time: its prompt counts, less what a branch shares from its start."""
        request.is_counted = True
        self.prompt += max(0, request.num_prompt_tokens - request.num_accounted_tokens)
        if is_query:
            self.queries += max(0, len(request.token_ids) - request.num_accounted_tokens)

    def admit(self, request: Request, *, is_query: bool) -> int:
        """The request holds its first num_computed_tokens from the cache. Returns how many of them are hits."""
        if not request.is_counted:
            self.enter(request, is_query=is_query)
        num_hit = max(0, request.num_computed_tokens - request.num_accounted_tokens)
        self.hit += num_hit
        self.restored += request.num_computed_tokens - num_hit
        request.num_cached_tokens += num_hit
        request.num_accounted_tokens += num_hit
        return num_hit

    def account(self, request: Request, start: int, end: int) -> None:
        """Positions [start, end) of the request were run."""
        fresh = max(0, end - max(start, request.num_accounted_tokens))
        self.computed += fresh
        self.recomputed += end - start - fresh
        request.num_accounted_tokens += fresh


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV group; over all groups they add up to those of the pool that are not free."""

    used: int
    cached: int


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
    kv_group_blocks: tuple[GroupBlocks, ...]  # of each
    running: int
    waiting: int
    queries_tokens: int  # prompt tokens looked up in the cache, once a request
    hit_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    failed_tokens: int
    restored_tokens: int  # found again in the cache after a preemption; no hits
    processed_tokens: int  # rows that the executor reports: the ledger's truth
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    evicted_blocks: int
    passed_blocks: int  # blocks that requests gave up behind a window
    dropped_tokens: int  # that requests did not keep, by their policy
    copies: int  # blocks copied in part, for a hit inside a block or for a branch that writes
    finished: Mapping[str, int]  # finish reason -> requests; each branch of one counts
    branch_saved_blocks: int = 0  # blocks that branches of requests save now by sharing them
    branch_peak_saved_blocks: int = 0  # most that they saved at once so far


def core_status(
    counters: Counters, blocks: BlockManager, running: Sequence[Request], num_waiting: int, saved: tuple[int, int]
) -> CoreStatus:
    """Put the snapshot together."""
    pool = blocks.pool
    waste = {}  # the last block of a request -> its unfilled slots; branches that share it share them
    for request in running:
        table = request.block_tables[0]
        if table:
            waste[table[-1]] = len(table) * blocks.block_size + request.num_dropped_tokens - request.num_computed_tokens
    return CoreStatus(
        num_blocks=pool.num_blocks,
        block_size=blocks.block_size,
        kv_bytes_per_block=blocks.spec.bytes_per_block,
        free_blocks=pool.num_free,
        cached_blocks=len(pool.idle),
        used_blocks=pool.num_blocks - pool.num_available,
        internal_waste_tokens=sum(waste.values()),
        kv_groups=blocks.spec.groups,
        kv_group_blocks=tuple(GroupBlocks(*pool.counts(group)) for group in range(blocks.num_groups)),
        running=len(running),
        waiting=num_waiting,
        queries_tokens=counters.queries,
        hit_tokens=counters.hit,
        computed_tokens=counters.computed,
        recomputed_tokens=counters.recomputed,
        failed_tokens=counters.failed,
        restored_tokens=counters.restored,
        processed_tokens=counters.processed,
        prompt_tokens=counters.prompt,
        generation_tokens=counters.generation,
        preemptions=counters.preemptions,
        steps=counters.steps,
        evicted_blocks=blocks.supply.num_evicted,
        passed_blocks=blocks.leave.num_passed,
        dropped_tokens=blocks.leave.num_dropped_tokens,
        copies=blocks.num_copies,
        finished=dict(counters.finished),
        branch_saved_blocks=saved[0],
        branch_peak_saved_blocks=saved[1],
    )
