"""Index from token prefixes to the blocks that hold their K and V. It owns no block and knows no request.

One node stands for one token block (docs/decisions/0001): a path is never split, so a node, once handed out, stays
what it is until it is removed; but blocks of groups with a window may leave it before, and come back. Tokens are
compared as the bytes of their 4-byte ids, which is the fastest that Python has. Prefixes of different namespaces never
meet: each has its own root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.core.block_key import TOKEN_BYTES, BlockKeyChain
from octavo.core.radix_node import GONE, Node


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two texts have in common from their beginning."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class RadixTree:
    """All methods take whole blocks of tokens as bytes. `match` and `closest_child` change nothing."""

    __slots__ = ("_keys", "_node_of", "_roots", "_width")

    def __init__(self, block_size: int, num_blocks: int, keys: BlockKeyChain | None = None) -> None:
        self._width = block_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        # Invariant: _node_of[b] is the one node with b among its block_ids, or None.
        self._node_of: list[Node | None] = [None] * num_blocks
        self._keys = keys

    def match(self, namespace: str, tokens: bytes, num_blocks: int) -> list[Node]:
        """The longest indexed path along the first `num_blocks` blocks of `tokens`."""
        node = self._roots.get(_root_key(namespace))
        path: list[Node] = []
        if node is None:
            return path
        width = self._width
        for start in range(0, num_blocks * width, width):
            key = tokens[start : start + width]
            child = node.only_child
            if child is None or child.key != key:
                if node.branch is None:
                    break
                child = node.branch.by_key.get(key)
                if child is None:
                    break
            path.append(child)
            node = child
        return path

    def closest_child(self, namespace: str, node: Node | None, tail: bytes) -> tuple[Node | None, int]:
        """The child of `node` (None: the root) that agrees with `tail` for most tokens, and how many these are.

        In the order of the keys nothing agrees with `tail` for longer than the keys beside its place do. That is so for
        bytes; four bytes are a token, so it is so for tokens, though this is not the order of token ids.
        """
        if node is None:
            node = self._roots.get(_root_key(namespace))
            if node is None:
                return None, 0
        if node.only_child is not None:
            count = common_tokens(node.only_child.key, tail)
            return (node.only_child, count) if count else (None, 0)
        if node.branch is None:
            return None, 0
        best, longest = None, 0
        for key in node.branch.keys.neighbours(tail):
            count = common_tokens(key, tail)
            if count > longest:
                best, longest = node.branch.by_key[key], count
        return best, longest

    def insert(
        self, namespace: str, node: Node | None, tokens: bytes, rows: Sequence[tuple[int, ...]]
    ) -> tuple[Node, list[Node]]:
        """Index blocks below `node` (None: the root): `rows` gives the block ids, one tuple per token block.

        Returns the last node of the path and the twins: nodes that stood there already, for the first blocks. Where a
        twin stands the block of `rows` is not indexed, unless the twin's own is gone: then it takes its place.
        """
        if node is None:
            node = self._root(namespace)
        width = self._width
        twins: list[Node] = []
        keys = [tokens[start : start + width] for start in range(0, len(tokens), width)]
        for key in keys:
            twin = node.child(key)
            if twin is None:
                break
            if GONE in twin.block_ids:
                self._refill(twin, rows[len(twins)])
            twins.append(twin)
            node = twin
        first = len(twins)
        if first < len(keys):
            top, node = node, Node(keys[first], rows[first], node)
            top.link(node)
            added = [node]
            for key, block_ids in zip(keys[first + 1 :], rows[first + 1 :], strict=True):
                node.only_child = node = Node(key, block_ids, node)  # assigned from left to right: the parent first
                added.append(node)
            self._register(added, top, tokens[first * width :])
        return node, twins

    def remove(self, block_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Forget the nodes of these blocks (one of each node), in this order; each must be a leaf when its turn comes.

        Returns the block ids of each node, for all groups.
        """
        node_of = self._node_of
        removed = []
        for block_id in block_ids:
            node = node_of[block_id]
            assert node is not None, f"block {block_id} is not indexed"
            assert node.only_child is None, f"block {block_id} is no leaf"
            assert node.branch is None, f"block {block_id} is no leaf"
            parent = node.parent
            assert parent is not None
            if parent.only_child is node:
                parent.only_child = None
                if parent.parent is None:
                    del self._roots[parent.key]
            else:
                parent.unlink(node)
            removed.append(node.block_ids)
            for held in node.block_ids:
                if held != GONE:
                    node_of[held] = None
        return removed

    def take_out(self, block_id: int, group: int) -> None:
        """Forget one block of a group with a window; its node stays, as long as it has others or leads to some."""
        node = self._node_of[block_id]
        assert node is not None, f"block {block_id} is not indexed"
        ids = node.block_ids
        assert ids[group] == block_id, f"block {block_id} is not of group {group}"
        node.block_ids = (*ids[:group], GONE, *ids[group + 1 :])
        self._node_of[block_id] = None
        while node.parent is not None and node.only_child is None and node.branch is None:
            if any(one != GONE for one in node.block_ids):
                return
            node.parent.unlink(node)
            node = node.parent
        if node.parent is None and node.only_child is None and node.branch is None:
            del self._roots[node.key]

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            children = list(node.children())
            yield from children
            pending += children

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def _root(self, namespace: str) -> Node:
        key = _root_key(namespace)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, (), None)
            root.block_key = self._keys.root(namespace) if self._keys is not None else b""
        return root

    def _register(self, added: list[Node], top: Node, tokens: bytes) -> None:
        """Make new nodes known by their blocks, and name them."""
        node_of = self._node_of
        for node in added:
            for block_id in node.block_ids:
                node_of[block_id] = node
        if self._keys is not None:
            for node, block_key in zip(added, self._keys.extend(top.block_key, tokens), strict=True):
                node.block_key = block_key

    def _refill(self, node: Node, block_ids: tuple[int, ...]) -> None:
        """The node gets blocks in place of those that are gone."""
        for one, new in zip(node.block_ids, block_ids, strict=True):
            if one == GONE:
                self._node_of[new] = node
        filled = [new if one == GONE else one for one, new in zip(node.block_ids, block_ids, strict=True)]
        node.block_ids = tuple(filled)


def _root_key(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")
