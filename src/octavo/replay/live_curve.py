"""What caches of other sizes would hit, estimated while an engine runs. A listener of the core's events.

The order that it keeps is that of the engine's idle blocks, beyond those that are still there: blocks that nobody
holds, the latest released on top. A block would be a hit in a cache that has room for what requests hold, for all that
stand above it, and for itself. Only blocks of a sample are kept (by a hash of all that a block stands for), and each
then stands for many (`hit_curve.SampledCurve` tells why); so memory and time are bounded, whatever the cache.

It belongs to the engine's thread. It knows no tokens but as bytes to hash, and no requests but what they hold.
"""

from __future__ import annotations

from bisect import bisect_left

from octavo.core import events
from octavo.core.block_manager import BlockManager
from octavo.core.cache_curve import CacheCurve, CurveEstimate
from octavo.core.engine_core import EngineCore
from octavo.replay.recency import RecencyOrder

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
MAX_GHOSTS = 8192
_FORGET_AFTER = 1 << 20  # lookups of the sample, after which all counts are halved
_HASH_MASK = (1 << 32) - 1


class _Holding:
    """What a request holds, and how much of its prompt is still to be counted."""

    __slots__ = ("blocks", "counted", "wanted")

    def __init__(self, wanted: int) -> None:
        self.blocks = 0
        self.wanted = wanted  # blocks of the prompt that could be hits
        self.counted = 0  # the first so many have been counted


class LiveCurve:
    """To be made before the core begins."""

    def __init__(self, core: EngineCore) -> None:
        self._blocks: BlockManager = core.scheduler.blocks
        num_blocks = self._blocks.pool.num_blocks // self._blocks.num_groups
        self._num_blocks = num_blocks
        self._rate = min(1.0, MAX_GHOSTS / (SCALES[-1] * num_blocks))
        self._threshold = int(self._rate * (_HASH_MASK + 1))
        self._sizes = [round(scale * num_blocks) for scale in SCALES]
        self._idle = RecencyOrder(max(16, round(SCALES[-1] * num_blocks * self._rate)))
        self._hash_of: dict[int, int] = {}  # block of the first group -> hash of all up to its end
        self._holdings: dict[str, _Holding] = {}
        self._lookups = self._hits = 0.0  # blocks; really
        self._sampled = 0.0
        self._fits = [0.0] * (len(SCALES) + 1)  # lookups of the sample by the first size that they fit
        core.add_listener(self.heard)

    def snapshot(self) -> CacheCurve:
        expected = self._lookups * self._rate
        fits, estimates = 0.0, []
        for scale, size, more in zip(SCALES, self._sizes, self._fits, strict=False):
            fits += more
            share = (fits + expected - self._sampled) / expected if expected else 0.0
            estimates.append(CurveEstimate(scale, size, min(1.0, max(0.0, share))))
        return CacheCurve(
            num_blocks=self._num_blocks,
            block_size=self._blocks.block_size,
            kv_bytes_per_block=self._blocks.spec.bytes_per_block,
            lookup_blocks=round(self._lookups),
            hit_blocks=round(self._hits),
            hit_rate=self._hits / self._lookups if self._lookups else 0.0,
            estimates=tuple(estimates),
            sample=self._rate,
            ghost_blocks=len(self._idle),
        )

    def heard(self, event: events.Event) -> None:
        match event:
            case events.RequestAdded():
                wanted = (event.num_prompt_tokens - 1) // self._blocks.block_size
                self._holdings[event.request_id] = _Holding(wanted)
            case events.PrefixAttached():
                self._attached(event)
            case events.BlocksGrown():
                self._holding(event.request_id).blocks += len(event.block_tables[0])
            case events.RequestForked():
                holding = self._holdings[event.child_id] = _Holding(0)
                holding.blocks = len(event.block_tables[0])
            case events.BlocksCommitted():
                self._committed(event)
            case events.BlocksDropped():
                self._holding(event.request_id).blocks -= len(event.block_tables[0])
            case events.BlocksReleased():
                self._released(event)
            case events.BlocksEvicted():
                for node in event.blocks:
                    self._hash_of.pop(node[0], None)
            case events.RequestFinished():
                if not event.output.open_branches:
                    self._holdings.pop(event.output.request_id, None)

    def _holding(self, request_id: str) -> _Holding:
        return self._holdings.setdefault(request_id, _Holding(0))

    def _held(self) -> int:
        """Blocks of the first group that requests hold."""
        return self._blocks.pool.counts(0)[0]

    def _attached(self, event: events.PrefixAttached) -> None:
        table, holding = event.block_tables[0], self._holding(event.request_id)
        others = self._held() - len(table)
        counted = min(len(table), holding.wanted)
        known = [self._hash_of.get(block) for block in table]
        if holding.counted < counted:
            self._lookups += counted - holding.counted
            self._hits += counted - holding.counted
        for index, found in enumerate(known):
            if holding.counted <= index < counted:
                self._look_up(found, others + index, is_hit=True)
            if found is not None:
                self._idle.remove(found)
        holding.counted = max(holding.counted, counted)
        holding.blocks += len(table)

    def _committed(self, event: events.BlocksCommitted) -> None:
        """Blocks that were computed; those of the prompt were looked up before, and were not there."""
        holding, index = self._holding(event.request_id), event.num_blocks_before
        others = max(0, self._held() - holding.blocks)
        parent: int | None = hash(event.namespace) & 0x7FFFFFFFFFFFFFFF
        if event.num_blocks_before:
            parent = self._hash_of.get(event.parent_block_ids[0])
        found: list[int | None] = []
        for block in (*event.twins, *event.blocks):
            parent = None if parent is None else hash((parent, block.tokens))
            if parent is not None and block.block_ids[0] >= 0:
                self._hash_of[block.block_ids[0]] = parent
            found.append(parent)
        for one in found:
            if holding.counted <= index < holding.wanted:
                holding.counted = index + 1
                self._lookups += 1
                self._look_up(one, others + index, is_hit=False)
            if one is not None:
                self._idle.remove(one)
            index += 1

    def _released(self, event: events.BlocksReleased) -> None:
        ref_count, table = self._blocks.pool.ref_count, event.block_tables[0]
        for block in reversed(table):
            known = self._hash_of.get(block) if block >= 0 else None  # else a window has passed it
            if known is not None and not ref_count[block] and known & _HASH_MASK < self._threshold:
                self._idle.put(known)
        holding = self._holdings.get(event.request_id)
        if holding is not None:
            holding.blocks = 0
            if not holding.wanted:
                del self._holdings[event.request_id]

    def _look_up(self, found: int | None, held: int, *, is_hit: bool) -> None:
        """Count a block of the sample by the size that it fits.

        `held`: by other requests, and the blocks before it of its own text, which need room as well.
        """
        if found is None or found & _HASH_MASK >= self._threshold:
            return
        self._sampled += 1
        depth = self._idle.depth(found)
        if depth is not None:
            needed = held + depth / self._rate + 1
            self._fits[bisect_left(self._sizes, needed)] += 1
        elif is_hit:
            self._fits[0] += 1  # another request holds it: a cache that holds what runs has it, however small
        if self._sampled >= _FORGET_AFTER:
            self._lookups, self._hits, self._sampled = self._lookups / 2, self._hits / 2, self._sampled / 2
            self._fits = [count / 2 for count in self._fits]
