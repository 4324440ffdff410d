"""What a look-up in the cache found. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.radix_tree import Node


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache has of a request's tokens. Good until the next call that changes blocks."""

    nodes: list[Node]  # whole blocks, from the first on
    source: Node | None  # a block to copy the beginning of
    source_tokens: int
    num_tokens: int  # in all


NO_MATCH = PrefixMatch([], None, 0, 0)
