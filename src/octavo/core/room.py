"""How many blocks requests are going to need: what admission and preemption reckon with. It changes nothing.

A sequence of n tokens needs a block for every `block_size` tokens in each group that keeps all tokens, and a bounded
number in each group with a window, which is largest while a step computes many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.block_manager import BlockManager
from octavo.core.branches import Branches, Join
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import Request


class Room:
    """Of one pool, for steps of at most `step_tokens` tokens."""

    __slots__ = ("_blocks", "_step_tokens")

    def __init__(self, blocks: BlockManager, step_tokens: int) -> None:
        self._blocks = blocks
        self._step_tokens = step_tokens

    def is_there(
        self, request: Request, match: PrefixMatch, running: Sequence[Request], groups: Iterable[Branches]
    ) -> bool:
        """All known tokens fit, beside what running requests still need for theirs and a block for each of them.

        `groups` are those of `running` that have several branches.
        """
        blocks, reserved = self._blocks, 0
        for other in running:
            if not other.coasts_until:  # else its blocks cover what it knows until it wakes
                reserved += self.still_needed(other)
        reserved += len(running) * blocks.num_groups
        for group in groups:  # branches that are still to come: their tails, and a block for each
            reserved += self.to_join(group, group.joins)
            reserved += (group.num_seats - group.num_running) * blocks.num_groups
        needed = self.to_hold(request, match)
        if request.group is not None:
            needed += self.to_join(request.group, request.group.all_joins())
        return needed + reserved <= blocks.pool.num_available

    def still_needed(self, request: Request) -> int:
        """Blocks that a running request does not hold yet and needs for its known tokens."""
        num_tokens, blocks = request.num_slots(len(request.token_ids)), self._blocks
        if not blocks.windows:
            return max(0, -(-num_tokens // blocks.block_size) - len(request.block_tables[0])) * blocks.num_groups
        step = min(self._step_tokens, len(request.token_ids) - request.num_computed_tokens)
        return max(0, blocks.spec.blocks_for_tokens(num_tokens, max(1, step)) - request.num_held_blocks)

    def to_hold(self, request: Request, match: PrefixMatch) -> int:
        """By how many the available blocks shrink, at most, while a request attaches and grows to its known tokens."""
        blocks, nodes, needed = self._blocks, match.nodes, 0
        ref_count, num_tokens = blocks.pool.ref_count, request.num_slots(len(request.token_ids))
        covering = -(-num_tokens // blocks.block_size)
        own = self._to_keep(request)
        for group in blocks.windows.growing:
            num_idle = 0
            for node in reversed(nodes):  # whoever holds a node holds those above it
                if ref_count[node.block_ids[group]]:
                    break
                num_idle += 1
            needed += max(covering + num_idle - len(nodes), own)
        for group, behind in blocks.windows.behind:
            kept = nodes[max(0, len(nodes) - behind) :]
            num_held = sum(ref_count[node.block_ids[group]] > 0 for node in kept)
            most = blocks.spec.groups[group].blocks_for_tokens(num_tokens, blocks.block_size, self._step_tokens)
            needed += min(most, covering - len(nodes) + len(kept) - num_held)
        return needed

    def _to_keep(self, request: Request) -> int:
        """Blocks of each group that what it keeps by choice takes: its own, even where others hold what it found."""
        if request.kept is None:
            return 0
        num_tokens = len(request.token_ids)
        num_dropped = request.kept.drops.num_dropped(num_tokens)
        return -(-(num_tokens - num_dropped) // self._blocks.block_size) if num_dropped else 0

    def to_join(self, group: Branches, joins: Sequence[Join]) -> int:
        """Blocks of their own that branches need to hold their known tokens, beside what they share."""
        spec, needed = self._blocks.spec, 0
        for join in joins:
            shared_tokens = join.at if group.shares_blocks else 0
            needed += spec.own_blocks(len(join.child.token_ids), shared_tokens, self._step_tokens)
        return needed
