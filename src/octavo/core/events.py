"""What the core tells those who listen: ledger, metrics, traces, a replay. Plain data, made only if somebody listens.

The order of events is the order of decisions. Replaying `BlocksCommitted` and `BlocksEvicted` gives the exact set of
blocks that a prefix can hit.

Where a window has passed, -1 stands for the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.request_output import RequestOutput


@dataclass(frozen=True, slots=True)
class RequestAdded:
    request_id: str
    namespace: str
    num_prompt_tokens: int
    priority: int


@dataclass(frozen=True, slots=True)
class StepStarted:
    """Events up to the next one of this kind belong to this step, or to what happened between the two."""

    step_index: int


@dataclass(frozen=True, slots=True)
class RequestWaits:
    """The request's prefix is being computed by another; it waits for the first `num_blocks` token blocks of it."""

    request_id: str
    computing_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    request_id: str
    num_known_tokens: int
    num_matched_tokens: int  # already in blocks: found in the cache
    num_hit_tokens: int  # of these, the ones counted as hits; less after a preemption


@dataclass(frozen=True, slots=True)
class PrefixAttached:
    """The request now holds these cached blocks, one table per KV group; -1 is none, as a window has passed it."""

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksGrown:
    """The request now holds these blocks as well, behind the others; one table per KV group."""

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksCopied:
    """The plan copies slots [0, num_tokens) of `sources` to `targets`, one block per KV group.

    `on_write` tells a branch that writes, and gives its share of the sources up, from a hit that ends inside a block.
    """

    request_id: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_tokens: int
    on_write: bool


@dataclass(frozen=True, slots=True)
class CommittedBlock:
    block_ids: tuple[int, ...]  # one per KV group
    tokens: bytes  # the block's token ids, 4 bytes each, in the machine's byte order
    block_key: bytes  # empty where keys are off


@dataclass(frozen=True, slots=True)
class BlocksCommitted:
    """Computed blocks can be hit from now on: `twins`, then `blocks`, each following the one before.

    `twins` are token blocks that another request had committed: the request gave its own blocks back and holds the
    other's. Where the other's had been evicted, behind a window, the request's own took the place.
    """

    request_id: str
    namespace: str
    num_blocks_before: int  # token blocks of the request that were committed earlier
    # Of the block that the first one follows, GONE for a tail; empty: the root of the namespace.
    parent_block_ids: tuple[int, ...]
    blocks: tuple[CommittedBlock, ...]
    twins: tuple[CommittedBlock, ...]


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    """Blocks that can be hit no more and are free; one tuple per token block, children before parents.

    A tuple has one entry per KV group: -1 where no block leaves. A token block is forgotten when none of its blocks is
    left, and nothing follows it.
    """

    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksPassed:
    """The request let go of the first blocks that it held of KV groups with a window; one table per group.

    In its tables -1 stands for them. Committed ones stay cached if nobody else holds them, and are evicted first.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksDropped:
    """The request keeps these blocks no more; they stood in its tables from index `first` on, others move up."""

    request_id: str
    first: int
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """The request let go of everything it held. Its committed blocks stay cached if nobody else holds them.

    -1 stands for blocks that a window had passed.
    """

    request_id: str
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestForked:
    """The child starts with the parent's tokens and shares its blocks, the last, unfilled one too."""

    parent_id: str
    child_id: str
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    request_id: str
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    output: RequestOutput  # the final one
    num_preemptions: int


Event = (
    RequestAdded
    | StepStarted
    | RequestWaits
    | RequestAdmitted
    | PrefixAttached
    | BlocksGrown
    | BlocksCopied
    | BlocksCommitted
    | BlocksEvicted
    | BlocksPassed
    | BlocksDropped
    | BlocksReleased
    | RequestForked
    | RequestPreempted
    | RequestFinished
)
Listener = Callable[[Event], None]
