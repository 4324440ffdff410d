"""The index: whole prefixes, parts of blocks, namespaces, and keys that collide."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import sorted_keys
from octavo.core.block_key import BlockKeyChain
from octavo.core.radix_node import Node
from octavo.core.radix_tree import RadixTree, common_tokens
from octavo.core.sorted_keys import SortedKeys


def as_bytes(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


class Tree:
    """A tree of blocks of two tokens that hands out block ids itself."""

    def __init__(self, tree: RadixTree | None = None) -> None:
        self.tree = tree or RadixTree(2, 10_000)
        self.next_id = 0

    def insert(self, tokens: list[int], namespace: str = "") -> Node:
        count = len(tokens) // 2
        rows = [(self.next_id + index,) for index in range(count)]
        self.next_id += count
        return self.tree.insert(namespace, None, as_bytes(tokens), rows)[0]

    def match(self, tokens: list[int], namespace: str = "") -> list[int]:
        return [node.block_ids[0] for node in self.tree.match(namespace, as_bytes(tokens), len(tokens) // 2)]


def test_the_longest_prefix_matches() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 5, 6]) == [0, 1, 2]
    assert tree.match([1, 2, 3, 4, 5, 7]) == [0, 1]
    assert tree.match([1, 2, 4, 3, 5, 6]) == [0]
    assert tree.match([2, 1]) == []
    assert tree.match([]) == []


def test_twins_are_told_and_not_indexed() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    node, twins = tree.tree.insert("", None, as_bytes([1, 2, 3, 4, 5, 6]), [(10,), (11,), (12,)])
    assert [twin.block_ids for twin in twins] == [(0,), (1,)]
    assert node.block_ids == (12,)
    assert tree.match([1, 2, 3, 4, 5, 6]) == [0, 1, 12]
    assert [n.block_ids[0] for n in tree.tree.nodes()] == [0, 1, 12]


def test_namespaces_never_meet() -> None:
    """F20: not even with a name that could pass for another's beginning, or for the default one."""
    tree = Tree()
    names = ["", "a", "ab", "a\x00", "\udc80"]
    for name in names:
        assert tree.match([1, 2], name) == []
        assert tree.tree.closest_child(name, None, as_bytes([1, 2])) == (None, 0)
        tree.insert([1, 2], name)
    assert [tree.match([1, 2], name) for name in names] == [[0], [1], [2], [3], [4]]
    assert tree.tree.num_namespaces == 5
    tree.tree.remove([0, 1, 2, 3, 4])
    assert tree.tree.num_namespaces == 0, "an empty namespace takes memory for ever"


def test_only_leaves_can_be_removed() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 5, 6])
    with pytest.raises(AssertionError, match="no leaf"):
        tree.tree.remove([0])
    assert tree.tree.remove([1, 3, 0]) == [(1,), (3,), (0,)]
    with pytest.raises(AssertionError, match="not indexed"):
        tree.tree.remove([0])


def test_match_changes_nothing() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    before = [(n.key, n.block_ids, n.parent, n.only_child, n.branch) for n in tree.tree.nodes()]
    tree.match([1, 2, 3, 9])
    tree.tree.closest_child("", None, as_bytes([1, 9]))
    tree.match([1, 2], "new namespace")
    assert [(n.key, n.block_ids, n.parent, n.only_child, n.branch) for n in tree.tree.nodes()] == before
    assert tree.tree.num_namespaces == 1


BLOCKS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=30, unique=True
)


@settings(deadline=None)
@given(blocks=BLOCKS, removed=st.data(), tail=st.lists(st.integers(0, 300), min_size=1, max_size=3))
def test_the_closest_child_is_the_closest(
    blocks: list[tuple[int, ...]], removed: st.DataObject, tail: list[int]
) -> None:
    """As trying all children would tell; also after some left, and with ids of which the bytes are in another order."""
    tree = RadixTree(3, 100)
    for index, block in enumerate(blocks):
        tree.insert("", None, as_bytes(list(block)), [(index,)])
    gone = removed.draw(st.lists(st.sampled_from(range(len(blocks))), unique=True))
    tree.remove(gone)
    left = {index: block for index, block in enumerate(blocks) if index not in gone}

    def agree(block: tuple[int, ...]) -> int:
        return next((i for i, (a, b) in enumerate(zip(block, tail, strict=False)) if a != b), min(3, len(tail)))

    node, count = tree.closest_child("", None, as_bytes(tail))
    assert count == max(map(agree, left.values()), default=0)
    if count:
        assert node is not None
        assert agree(left[node.block_ids[0]]) == count
    else:
        assert node is None


@given(
    one=st.lists(st.integers(0, 2**32 - 1), max_size=9),
    other=st.lists(st.integers(0, 2**32 - 1), max_size=9),
    same=st.integers(0, 9),
)
def test_common_tokens(one: list[int], other: list[int], same: int) -> None:
    other = one[:same] + other
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_tokens(as_bytes(one), as_bytes(other)) == expected


def test_sorted_keys_stay_sorted_over_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_keys, "BUCKET_KEYS", 8)
    rng = random.Random(0)
    present = {b"m"}
    keys = SortedKeys(present)
    for _ in range(3000):
        key = bytes([rng.randrange(256), rng.randrange(4)])
        if key in present and len(present) > 1:
            present.remove(key)
            keys.remove(key)
        elif key not in present:
            present.add(key)
            keys.add(key)
        probe = bytes([rng.randrange(256), rng.randrange(4)])
        below, above = [k for k in present if k < probe], [k for k in present if k >= probe]
        assert keys.neighbours(probe) == [*([max(below)] if below else []), *([min(above)] if above else [])]
    assert list(keys) == sorted(present)


class WeakBytes(bytes):
    """Bytes whose hash has only eight bits, whole and in slices: nearly all keys of a large tree collide."""

    def __hash__(self) -> int:
        return sum(self) & 0xFF

    def __getitem__(self, item):  # type: ignore[no-untyped-def]
        part = bytes.__getitem__(self, item)
        return WeakBytes(part) if isinstance(item, slice) else part


def test_a_key_of_eight_bits_never_gives_a_wrong_block() -> None:
    """F5: hashes may collide as they like, because tokens are compared."""
    rng = random.Random(0)
    tree = RadixTree(2, 5000)
    texts = [[rng.randrange(40), rng.randrange(40), rng.randrange(40), rng.randrange(40)] for _ in range(2000)]
    where: dict[tuple[int, ...], int] = {}
    for index, text in enumerate(texts):
        rows = [(2 * index,), (2 * index + 1,)]
        node, _ = tree.insert("", None, WeakBytes(as_bytes(text)), rows)
        where.setdefault(tuple(text), node.block_ids[0])
    hashes = {hash(WeakBytes(node.key)) for node in tree.nodes()}
    assert len(hashes) <= 256 < len(where)
    for text in texts:
        assert tree.match("", WeakBytes(as_bytes(text)), 2)[-1].block_ids[0] == where[tuple(text)]
    for _ in range(2000):
        text = [rng.randrange(45) for _ in range(4)]
        path = tree.match("", WeakBytes(as_bytes(text)), 2)
        assert b"".join(node.key for node in path) == as_bytes(text)[: 8 * len(path)]
        assert (len(path) == 2) == (tuple(text) in where)


def test_nodes_are_named_by_the_key_chain() -> None:
    chain = BlockKeyChain(model_digest="d", kv_format="bf16", block_size=2)
    tree = Tree(RadixTree(2, 100, chain))
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8])
    path = tree.tree.match("", as_bytes([1, 2, 3, 4, 5, 6, 7, 8]), 4)
    assert [node.block_key for node in path] == chain.extend(chain.root(""), as_bytes([1, 2, 3, 4, 5, 6, 7, 8]))
