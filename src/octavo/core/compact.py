"""What attention has chosen moves to blocks of the request's own; the others it gives up. It decides blocks only."""

from __future__ import annotations

from octavo.core.block_manager import BlockManager
from octavo.core.prefix_match import NO_MATCH
from octavo.core.request import Request
from octavo.core.step import Compaction


def is_due(request: Request) -> bool:
    """Whether some of what is computed is to be dropped before another token runs."""
    if request.kept is None:
        return False
    return request.kept.drops.num_dropped(request.num_computed_tokens) > request.num_dropped_tokens


def compact(blocks: BlockManager, request: Request) -> Compaction | None:
    """Change over to blocks for what is kept. All or nothing: None, and nothing changed, when they cannot be had.

    The blocks that it held are given up first, so that they count as available where nobody else holds them: the
    plan's compaction reads all before it writes. Cached ones stay cached, for they have read all before them.
    """
    kept, num_computed = request.kept, request.num_computed_tokens
    assert kept is not None
    num_slots = num_computed - request.num_dropped_tokens
    num_dropped = kept.drops.num_dropped(num_computed)
    num_kept = num_computed - num_dropped
    needed = -(-num_kept // blocks.block_size) * blocks.num_groups
    ref_count, sources = blocks.pool.ref_count, tuple(table[:] for table in request.block_tables)
    if needed > blocks.pool.num_available + sum(ref_count[block_id] == 1 for table in sources for block_id in table):
        return None
    gone = num_dropped - request.num_dropped_tokens
    blocks.release(request)
    blocks.attach_prefix(request, NO_MATCH)
    copies = blocks.grow(request, num_kept)
    assert copies == (), "what is available could not be had"
    request.num_computed_tokens, request.num_dropped_tokens = num_computed, num_dropped
    blocks.leave.num_dropped_tokens += gone
    targets = tuple(table[:] for table in request.block_tables)
    return Compaction(sources, targets, num_slots, num_kept, kept.keep_list(num_computed))
