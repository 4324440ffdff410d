"""Token ids of texts, and of parts of texts, that were encoded before: a bounded memory, the oldest use goes first.

A talk that goes on sends its whole history again; of its parts only the new ones are encoded. What one namespace has
brought is never found by another. It does not know how texts are cut or encoded. Not for several threads at once.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from typing import NamedTuple

from octavo.errors import ConfigError

DEFAULT_BYTES = 16 << 20
ENTRY_BYTES = 360  # of an entry beside its text, its namespace and its ids: key, array, links


class Part(NamedTuple):
    """What the ids of a text depend on, and who may find them."""

    namespace: str
    parse_special: bool
    text: str


class EncodingCache:
    """`num_bytes` is never more than `max_bytes`."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 0: the memory for encoded texts")
        self._max_bytes = max_bytes
        self._ids: OrderedDict[Part, array[int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, part: Part) -> array[int] | None:
        """Its ids, to be read only."""
        found = self._ids.get(part)
        if found is not None:
            self._ids.move_to_end(part)
        return found

    def keep(self, part: Part, ids: array[int]) -> None:
        """Keeps ids of a part that was not found, as long as there is room for it."""
        cost = _bytes_of(part, ids)
        if part in self._ids or cost > self._max_bytes:
            return
        while self._num_bytes + cost > self._max_bytes:
            self._num_bytes -= _bytes_of(*self._ids.popitem(last=False))
        self._ids[part] = ids
        self._num_bytes += cost


def _bytes_of(part: Part, ids: array[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(part.text) + sys.getsizeof(part.namespace) + len(ids) * ids.itemsize
