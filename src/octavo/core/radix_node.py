"""One token block in the index, and the children below it. It knows no tree and no pool."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.sorted_keys import SortedKeys

GONE = -1  # stands for the block of a group whose window has passed: nobody holds it here, and nothing reads it


class Branch:
    """The children of a node that has two or more."""

    __slots__ = ("by_key", "keys")

    def __init__(self, children: dict[bytes, Node]) -> None:
        self.by_key = children
        self.keys = SortedKeys(children)  # finds the child that agrees with a text for longest


class Node:
    """One token block in the index, below the blocks before it."""

    __slots__ = ("block_ids", "block_key", "branch", "key", "only_child", "parent")

    def __init__(self, key: bytes, block_ids: tuple[int, ...], parent: Node | None) -> None:
        self.key = key  # the block's tokens as bytes; of a root: its namespace
        # One per KV group; GONE where a window's block was evicted. Where all groups have windows, a node with children
        # may have no block at all: it is a place on the way to those that do.
        self.block_ids = block_ids
        self.parent = parent  # None: a root
        # Invariant: at most one of the two is set. Most nodes have one child, and need no dict for it.
        self.only_child: Node | None = None
        self.branch: Branch | None = None
        self.block_key = b""  # set where keys are on

    def child(self, key: bytes) -> Node | None:
        only = self.only_child
        if only is not None:
            return only if only.key == key else None
        return self.branch.by_key.get(key) if self.branch is not None else None

    def children(self) -> Iterator[Node]:
        if self.only_child is not None:
            yield self.only_child
        elif self.branch is not None:
            yield from self.branch.by_key.values()

    def link(self, child: Node) -> None:
        """A new child."""
        only = self.only_child
        if self.branch is not None:
            self.branch.by_key[child.key] = child
            self.branch.keys.add(child.key)
        elif only is not None:
            self.only_child = None
            self.branch = Branch({only.key: only, child.key: child})
        else:
            self.only_child = child

    def unlink(self, child: Node) -> None:
        """Take out one of the children."""
        if self.only_child is child:
            self.only_child = None
            return
        branch = self.branch
        assert branch is not None
        del branch.by_key[child.key]
        branch.keys.remove(child.key)
        if len(branch.by_key) == 1:
            self.branch = None
            (self.only_child,) = branch.by_key.values()
