"""The one door to KV blocks: what a request holds, what is cached, what is left. It decides nothing about order.

A request attaches to the cached blocks of its prefix, grows by free ones, commits those that are computed, and
releases all; blocks that all windows of their KV group have passed it lets go before. Blocks in use are written only by
a request that holds them alone: what another holds as well is copied first (copy-on-write). Work is in proportion to
the blocks that a call is about, never to the prefix behind them.
"""

from __future__ import annotations

from octavo.core import block_events, events
from octavo.core.block_events import frozen
from octavo.core.block_key import BlockKeyChain
from octavo.core.block_leave import BlockLeave
from octavo.core.block_pool import BlockPool
from octavo.core.block_supply import BlockSupply
from octavo.core.eviction import EvictionPolicy, LeastRecentlyUsed
from octavo.core.kv_spec import KVSpec
from octavo.core.prefix_match import NO_MATCH, PrefixMatch, look_up
from octavo.core.radix_tree import RadixTree
from octavo.core.request import Request
from octavo.core.step import BlockCopy
from octavo.core.streaming import DropPlan
from octavo.core.windows import Windows
from octavo.errors import ConfigError

Copies = tuple[BlockCopy, ...]


class BlockManager:
    """Blocks of one pool for requests of one scheduler."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        token_exact_hits: bool = True,
        block_keys: BlockKeyChain | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """`token_exact_hits` False is for KV formats that cannot be cut inside a block: hits are whole blocks then."""
        self.num_groups = len(spec.groups)
        if num_blocks < self.num_groups:
            raise ConfigError(
                f"the pool has {num_blocks} blocks; it must have one for each of {self.num_groups} KV groups"
            )
        self.spec = spec
        self.block_size = spec.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.token_exact_hits = token_exact_hits
        self.windows = Windows(spec)
        self.pool = BlockPool(num_blocks, policy if policy is not None else LeastRecentlyUsed(), self.num_groups)
        self.tree = RadixTree(spec.block_size, num_blocks, block_keys)
        self.listeners: list[events.Listener] = []
        self.supply = BlockSupply(self.pool, self.tree, self.windows, self.listeners)
        self.leave = BlockLeave(spec.block_size, self.pool, self.windows, self.listeners)
        self.num_copies = 0

    def find_prefix(self, request: Request) -> PrefixMatch:
        """What could be attached now. Changes nothing. The last known token is never found: its logits are wanted."""
        if not self.enable_prefix_caching:
            return NO_MATCH
        return look_up(self.tree, request, self.block_size, self.windows, token_exact=self.token_exact_hits)

    def attach_prefix(self, request: Request, match: PrefixMatch) -> Copies:
        """Give a request that holds nothing what `find_prefix` found. Returns the copies that its next row needs."""
        assert not request.block_tables, f"{request.request_id} attaches while it holds blocks"
        nodes, pool = match.nodes, self.pool
        request.block_tables, request.num_passed_blocks = self.windows.tables_of(nodes)
        for group in range(self.num_groups):
            pool.acquire(request.held_blocks(group))
        request.num_committed_blocks = request.num_shared_blocks = len(nodes)
        request.node = nodes[-1] if nodes else None
        request.num_computed_tokens = len(nodes) * self.block_size
        if self.listeners and nodes:
            self.tell(events.PrefixAttached(request.request_id, frozen(request.block_tables)))
        if match.source is None:
            return ()
        sources = match.source.block_ids
        pool.acquire(sources)  # pinned: it must not be evicted to become its own target
        copies: Copies = ()
        if pool.num_available >= self.num_groups:  # else no hit inside a block
            targets = self._append_blocks(request, 1)
            copies = self._copy(request, sources, targets, match.source_tokens, on_write=False)
            request.num_computed_tokens += match.source_tokens
        pool.release_cached(sources)  # now used more recently than before
        return copies

    def reach(self, request: Request) -> int:
        """The number of tokens that `grow` could cover now."""
        spare = self.pool.num_available - len(self._shared_tail(request))
        if spare < 0:
            return request.num_computed_tokens
        num_slots = (len(request.block_tables[0]) + spare // self.num_groups) * self.block_size
        return num_slots + request.num_dropped_tokens

    def grow(self, request: Request, num_tokens: int) -> Copies | None:
        """Make the tables cover `num_tokens`, so that what is written next goes to blocks of the request's own.

        All or nothing: None, and nothing changed, when the blocks for it cannot be had.
        """
        added = -(-(num_tokens - request.num_dropped_tokens) // self.block_size) - len(request.block_tables[0])
        shared = self._shared_tail(request)
        if added <= 0 and not shared:
            return ()
        if max(added, 0) * self.num_groups + len(shared) > self.pool.num_available:
            return None
        copies: Copies = ()
        if shared:
            own = self.supply.take(len(shared))
            self.pool.release_private(shared)
            for table, block_id in zip(request.block_tables, own, strict=True):
                table[request.num_computed_tokens // self.block_size] = block_id
            copies = self._copy(request, shared, own, request.num_computed_tokens % self.block_size, on_write=True)
        if added > 0:
            self._append_blocks(request, added)
        return copies

    def commit(self, request: Request) -> None:
        """Index the blocks that are computed and full, so that others can hit them; let go of those behind the windows.

        Where another request has committed the same tokens already, this one changes over to the other's blocks (the
        same bits, by law) and gives its own back: so every table is a path of the tree.
        """
        done, full = request.num_committed_blocks, request.num_computed_tokens // self.block_size
        if request.drops is not None:
            full = min(full, request.num_sharable_tokens // self.block_size)
        if full > done and self.enable_prefix_caching:
            self._index(request, done, full)
        if self.windows:
            self.leave.pass_windows(request, is_cached=self.enable_prefix_caching)
        if isinstance(request.drops, DropPlan):
            self.leave.drop_tokens(request)

    def _index(self, request: Request, done: int, full: int) -> None:
        tables, above = request.block_tables, request.node
        rows = list(zip(*[table[done:full] for table in tables], strict=True))
        tokens = request.token_ids[done * self.block_size : full * self.block_size].tobytes()
        request.node, twins = self.tree.insert(request.namespace, above, tokens, rows)
        request.num_committed_blocks = full
        if twins:
            request.num_shared_blocks = max(request.num_shared_blocks, done + len(twins))
        for index, twin in enumerate(twins, done):
            swaps = [one for one in zip(tables, twin.block_ids, strict=True) if one[0][index] != one[1]]
            self.pool.acquire([block_id for _, block_id in swaps])
            self.pool.release_private([table[index] for table, _ in swaps])
            for table, block_id in swaps:
                table[index] = block_id
        if self.listeners:
            self.tell(block_events.committed(request, above, full - done, len(twins)))

    def release(self, request: Request) -> None:
        """The request lets go of all its blocks; committed ones stay cached until they are evicted, windows first."""
        for group in (*[group for group, _ in self.windows.behind], *self.windows.growing):
            self._release_group(request, group)
        if self.listeners and request.block_tables:
            self.tell(events.BlocksReleased(request.request_id, frozen(request.block_tables)))
        request.block_tables, request.num_passed_blocks = [], []
        request.num_committed_blocks = request.num_computed_tokens = request.num_dropped_tokens = 0
        request.node = None

    def _release_group(self, request: Request, group: int) -> None:
        if not request.block_tables:
            return
        block_ids = request.block_tables[group].tolist()
        first, committed = request.num_passed_blocks[group], request.num_committed_blocks
        self.pool.release_private(block_ids[max(first, committed) :])
        self.pool.release_cached(block_ids[first:committed][::-1])

    def restart(self, request: Request) -> None:
        """The request computes everything again, from its first token, though nothing is cached."""
        if self.windows or request.num_dropped_tokens:  # what was given up must be written again
            self.release(request)
            self.attach_prefix(request, NO_MATCH)
        request.num_computed_tokens = 0

    def fork(self, parent: Request, child: Request) -> None:
        """The child, whose tokens begin as the parent's computed ones, holds what the parent has computed as well.

        Full blocks stay shared. The last, unfilled one is copied by whichever branch writes first (see `grow`).
        """
        assert not child.block_tables, f"{child.request_id} is forked while it holds blocks"
        num_tokens = parent.num_computed_tokens
        assert child.token_ids[:num_tokens] == parent.token_ids[:num_tokens], "a branch starts with its parent's tokens"
        num_blocks = -(-num_tokens // self.block_size)
        child.block_tables = [table[:num_blocks] for table in parent.block_tables]
        child.num_passed_blocks = parent.num_passed_blocks[:]
        for group in range(self.num_groups):
            self.pool.acquire(child.held_blocks(group))
        child.num_computed_tokens, child.node = num_tokens, parent.node
        child.num_committed_blocks, child.num_shared_blocks = parent.num_committed_blocks, parent.num_shared_blocks
        if self.listeners:
            self.tell(events.RequestForked(parent.request_id, child.request_id, frozen(child.block_tables)))

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nobody holds; returns how many there were."""
        self.supply.evict(count := len(self.pool.idle))
        return count

    def _shared_tail(self, request: Request) -> tuple[int, ...]:
        """The unfilled block that the request writes next, of each group, where another holds it as well."""
        index, filled = divmod(request.num_computed_tokens - request.num_dropped_tokens, self.block_size)
        if not filled or self.pool.ref_count[request.block_tables[0][index]] == 1:
            return ()
        return tuple(table[index] for table in request.block_tables)

    def _append_blocks(self, request: Request, count: int) -> list[int]:
        block_ids = self.supply.take(count * self.num_groups)
        for group, table in enumerate(request.block_tables):
            table.fromlist(block_ids[group * count : (group + 1) * count])
        if self.listeners:
            self.tell(events.BlocksGrown(request.request_id, frozen([t[-count:] for t in request.block_tables])))
        return block_ids

    def _copy(
        self, request: Request, sources: tuple[int, ...], targets: list[int], num_tokens: int, *, on_write: bool
    ) -> Copies:
        self.num_copies += len(sources)
        if self.listeners:
            self.tell(events.BlocksCopied(request.request_id, sources, tuple(targets), num_tokens, on_write))
        return tuple(BlockCopy(source, target, num_tokens) for source, target in zip(sources, targets, strict=True))

    def tell(self, event: events.Event) -> None:
        """Call each listener. Ask first whether there are any, so that no event is made for nobody."""
        for listener in self.listeners:
            listener(event)
