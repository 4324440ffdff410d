"""Looking up in the cache, and what was found. It changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.radix_node import GONE, Node
from octavo.core.radix_tree import RadixTree
from octavo.core.request import Request
from octavo.core.windows import Windows


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache has of a request's tokens. Good until the next call that changes blocks."""

    nodes: list[Node]  # whole blocks, from the first on
    source: Node | None  # a block to copy the beginning of
    source_tokens: int
    num_tokens: int  # in all


NO_MATCH = PrefixMatch([], None, 0, 0)


def look_up(tree: RadixTree, request: Request, block_size: int, windows: Windows, *, token_exact: bool) -> PrefixMatch:
    """What the tree has of the request's tokens that may be hit: never of the last, which must run to give logits.

    A path whose window blocks are gone is found only up to where the blocks are there that the next row must read.
    """
    usable = request.max_hit_tokens
    nodes = tree.match(request.namespace, request.token_ids.tobytes(), usable // block_size)
    if windows:
        del nodes[windows.reach_of(nodes) :]
    matched = len(nodes) * block_size
    if not token_exact or matched == usable:
        return PrefixMatch(nodes, None, 0, matched)
    tail = request.token_ids[matched : min(matched + block_size, usable)].tobytes()
    source, count = tree.closest_child(request.namespace, nodes[-1] if nodes else None, tail)
    if source is not None and GONE in source.block_ids:
        source, count = None, 0
    return PrefixMatch(nodes, source, count, matched + count)
