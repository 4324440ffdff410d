"""Byte strings in order, to find the neighbours of one that may not be among them. It knows no tree and no tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

BUCKET_KEYS = 512  # a bucket that grows past this is halved: moving so many pointers costs less than a look-up


class SortedKeys:
    """Adds, removes and finds neighbours in time that hardly grows with the number of keys: buckets are bounded."""

    __slots__ = ("_buckets", "_firsts")

    def __init__(self, keys: Iterable[bytes]) -> None:
        """At least one key, all different."""
        bucket = sorted(keys)
        self._buckets = [bucket]
        self._firsts = [bucket[0]]

    def __iter__(self) -> Iterator[bytes]:
        return (key for bucket in self._buckets for key in bucket)

    def add(self, key: bytes) -> None:
        """`key` is not among the keys yet."""
        index = self._index(key)
        bucket = self._buckets[index]
        insort(bucket, key)
        self._firsts[index] = bucket[0]
        if len(bucket) > BUCKET_KEYS:
            upper = bucket[BUCKET_KEYS // 2 :]
            del bucket[BUCKET_KEYS // 2 :]
            self._buckets.insert(index + 1, upper)
            self._firsts.insert(index + 1, upper[0])

    def remove(self, key: bytes) -> None:
        """`key` is among the keys."""
        index = self._index(key)
        bucket = self._buckets[index]
        place = bisect_left(bucket, key)
        assert bucket[place] == key, "a key is removed that was never added"
        del bucket[place]
        if bucket:
            self._firsts[index] = bucket[0]
        elif len(self._buckets) > 1:
            del self._buckets[index], self._firsts[index]

    def neighbours(self, key: bytes) -> list[bytes]:
        """The last key before `key` and the first one from `key` on, as far as there are such keys."""
        index = self._index(key)
        bucket = self._buckets[index]
        place = bisect_left(bucket, key)
        found = []
        if place:
            found.append(bucket[place - 1])
        elif index:
            found.append(self._buckets[index - 1][-1])
        if place < len(bucket):
            found.append(bucket[place])
        elif index + 1 < len(self._buckets):
            found.append(self._firsts[index + 1])
        return found

    def _index(self, key: bytes) -> int:
        """The bucket where `key` is, or belongs."""
        return max(bisect_right(self._firsts, key) - 1, 0)
