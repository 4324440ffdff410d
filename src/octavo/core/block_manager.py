"""The one door to KV blocks: what a request holds, what is cached, what is left. It decides nothing about order.

A request attaches to the cached blocks of its prefix, grows by free ones, commits those that are computed, and
releases all. Blocks in use are written only by a request that holds them alone: what another holds as well is copied
first (copy-on-write). Work is in proportion to the blocks that a call is about, never to the prefix behind them.
"""

from __future__ import annotations

from array import array

from octavo.core import events
from octavo.core.block_key import BlockKeyChain
from octavo.core.block_pool import BlockPool
from octavo.core.eviction import EvictionPolicy, LeastRecentlyUsed
from octavo.core.kv_spec import KVSpec
from octavo.core.prefix_match import NO_MATCH, PrefixMatch, look_up
from octavo.core.radix_tree import Node, RadixTree
from octavo.core.request import Request
from octavo.core.step import BlockCopy
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
        self.pool = BlockPool(num_blocks, policy if policy is not None else LeastRecentlyUsed())
        self.tree = RadixTree(spec.block_size, num_blocks, block_keys)
        self.listeners: list[events.Listener] = []
        self.num_evicted_blocks = 0
        self.num_copies = 0

    def find_prefix(self, request: Request) -> PrefixMatch:
        """What could be attached now. Changes nothing. The last known token is never found: its logits are wanted."""
        if not self.enable_prefix_caching:
            return NO_MATCH
        return look_up(self.tree, request, self.block_size, token_exact=self.token_exact_hits)

    def blocks_to_hold(self, request: Request, match: PrefixMatch) -> int:
        """By how many the available blocks shrink when the request attaches and then grows to all its known tokens."""
        ref_count = self.pool.ref_count
        num_idle = 0
        for node in reversed(match.nodes):  # whoever holds a node holds those above it
            if ref_count[node.block_ids[0]]:
                break
            num_idle += 1
        return self.spec.blocks_for_tokens(len(request.token_ids)) + (num_idle - len(match.nodes)) * self.num_groups

    def attach_prefix(self, request: Request, match: PrefixMatch) -> Copies:
        """Give a request that holds nothing what `find_prefix` found. Returns the copies that its next row needs."""
        assert not request.block_tables, f"{request.request_id} attaches while it holds blocks"
        nodes, pool = match.nodes, self.pool
        request.block_tables = [array("i", [node.block_ids[g] for node in nodes]) for g in range(self.num_groups)]
        for table in request.block_tables:
            pool.acquire(table)
        request.num_committed_blocks = len(nodes)
        request.node = nodes[-1] if nodes else None
        request.num_computed_tokens = len(nodes) * self.block_size
        if self.listeners and nodes:
            self.tell(events.PrefixAttached(request.request_id, _frozen(request.block_tables)))
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
        return (len(request.block_tables[0]) + spare // self.num_groups) * self.block_size

    def grow(self, request: Request, num_tokens: int) -> Copies | None:
        """Make the tables cover `num_tokens`, so that what is written next goes to blocks of the request's own.

        All or nothing: None, and nothing changed, when the blocks for it cannot be had.
        """
        added = -(-num_tokens // self.block_size) - len(request.block_tables[0])
        shared = self._shared_tail(request)
        if added <= 0 and not shared:
            return ()
        if max(added, 0) * self.num_groups + len(shared) > self.pool.num_available:
            return None
        copies: Copies = ()
        if shared:
            own = self._take(len(shared))
            self.pool.release_private(shared)
            for table, block_id in zip(request.block_tables, own, strict=True):
                table[request.num_computed_tokens // self.block_size] = block_id
            copies = self._copy(request, shared, own, request.num_computed_tokens % self.block_size, on_write=True)
        if added > 0:
            self._append_blocks(request, added)
        return copies

    def commit(self, request: Request) -> None:
        """Index the blocks that are computed and full, so that others can hit them.

        Where another request has committed the same tokens already, this one changes over to the other's blocks (the
        same bits, by law) and gives its own back: so every table is a path of the tree.
        """
        done, full = request.num_committed_blocks, request.num_computed_tokens // self.block_size
        if full <= done or not self.enable_prefix_caching:
            return
        tables = request.block_tables
        rows = list(zip(*[table[done:full] for table in tables], strict=True))
        tokens = request.token_ids[done * self.block_size : full * self.block_size].tobytes()
        request.node, twins = self.tree.insert(request.namespace, request.node, tokens, rows)
        request.num_committed_blocks = full
        for index, twin in enumerate(twins, done):
            own = [table[index] for table in tables]
            self.pool.acquire(twin.block_ids)
            self.pool.release_private(own)
            for table, block_id in zip(tables, twin.block_ids, strict=True):
                table[index] = block_id
        if self.listeners:
            self._tell_committed(request, full - done, twins)

    def release(self, request: Request) -> None:
        """The request lets go of all its blocks; committed ones stay cached until they are evicted."""
        committed = request.num_committed_blocks
        for table in request.block_tables:
            block_ids = table.tolist()
            self.pool.release_private(block_ids[committed:])
            self.pool.release_cached(block_ids[:committed][::-1])
        if self.listeners and request.block_tables:
            self.tell(events.BlocksReleased(request.request_id, _frozen(request.block_tables)))
        request.block_tables = []
        request.num_committed_blocks = request.num_computed_tokens = 0
        request.node = None

    def fork(self, parent: Request, child: Request) -> None:
        """The child, whose tokens begin as the parent's computed ones, holds what the parent has computed as well.

        Full blocks stay shared. The last, unfilled one is copied by whichever branch writes first (see `grow`).
        """
        assert not child.block_tables, f"{child.request_id} is forked while it holds blocks"
        num_tokens = parent.num_computed_tokens
        assert child.token_ids[:num_tokens] == parent.token_ids[:num_tokens], "a branch starts with its parent's tokens"
        num_blocks = -(-num_tokens // self.block_size)
        child.block_tables = [table[:num_blocks] for table in parent.block_tables]
        for table in child.block_tables:
            self.pool.acquire(table)
        child.num_computed_tokens, child.node = num_tokens, parent.node
        child.num_committed_blocks = parent.num_committed_blocks
        if self.listeners:
            self.tell(events.RequestForked(parent.request_id, child.request_id, _frozen(child.block_tables)))

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nobody holds; returns how many there were."""
        self._evict(count := len(self.pool.idle))
        return count

    def _shared_tail(self, request: Request) -> tuple[int, ...]:
        """The unfilled block that the request writes next, of each group, where another holds it as well."""
        index, filled = divmod(request.num_computed_tokens, self.block_size)
        if not filled or self.pool.ref_count[request.block_tables[0][index]] == 1:
            return ()
        return tuple(table[index] for table in request.block_tables)

    def _append_blocks(self, request: Request, count: int) -> list[int]:
        block_ids = self._take(count * self.num_groups)
        for group, table in enumerate(request.block_tables):
            table.fromlist(block_ids[group * count : (group + 1) * count])
        if self.listeners:
            self.tell(events.BlocksGrown(request.request_id, _frozen([t[-count:] for t in request.block_tables])))
        return block_ids

    def _take(self, count: int) -> list[int]:
        missing = count - self.pool.num_free
        if missing > 0:
            self._evict(missing)
        return self.pool.take(count)

    def _evict(self, count: int) -> None:
        """Make at least `count` idle blocks free. With a node go its blocks of all groups."""
        idle = self.pool.idle
        while count > 0:
            chosen = idle.pop(count if self.num_groups == 1 else 1)
            removed = self.tree.remove(chosen)
            block_ids = [block_id for node_blocks in removed for block_id in node_blocks]
            if self.num_groups > 1:
                idle.remove(block_id for block_id in block_ids if block_id != chosen[0])
            self.pool.put_back(block_ids)
            self.num_evicted_blocks += len(block_ids)
            count -= len(block_ids)
            if self.listeners:
                self.tell(events.BlocksEvicted(tuple(removed)))

    def _copy(
        self, request: Request, sources: tuple[int, ...], targets: list[int], num_tokens: int, *, on_write: bool
    ) -> Copies:
        self.num_copies += len(sources)
        if self.listeners:
            self.tell(events.BlocksCopied(request.request_id, sources, tuple(targets), num_tokens, on_write))
        return tuple(BlockCopy(source, target, num_tokens) for source, target in zip(sources, targets, strict=True))

    def _tell_committed(self, request: Request, count: int, twins: list[Node]) -> None:
        """The last `count` blocks of the request's path were committed, of which the first ones are twins."""
        node, added = request.node, []
        for _ in range(count - len(twins)):
            assert node is not None
            added.append(events.CommittedBlock(node.block_ids, node.key, node.block_key))
            node = node.parent
        above = node.block_ids if node is not None else ()
        shared = tuple(twin.block_ids for twin in twins)
        before = request.num_committed_blocks - count
        about = (request.request_id, request.namespace, before, above, tuple(reversed(added)), shared)
        self.tell(events.BlocksCommitted(*about))

    def tell(self, event: events.Event) -> None:
        """Call each listener. Ask first whether there are any, so that no event is made for nobody."""
        for listener in self.listeners:
            listener(event)


def _frozen(tables: list[array[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table) for table in tables)
