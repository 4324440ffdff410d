"""Tokens that attention chose, for an executor that computes nothing: what stands where, and that it is replayed.

Two heads choose by chance, but as a function of the text alone. It knows no request but by its rows.
"""

from __future__ import annotations

import itertools
import random
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.selection import Choice
from octavo.core.step import BlockTable, Compaction, Row, Weighed, Weighing
from octavo.testing.text_hash import extend_hash

NUM_HEADS = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """What stands in for K and V of one token."""

    position: int
    token: int
    prefix: int  # hash of the tokens up to and including this one
    num_dropped: int = 0  # so many of them it has not seen


Chosen = tuple[Slot, ...]  # what each head keeps there


class ChosenSlots:
    """Works on the blocks of one checking executor."""

    def __init__(self, block_size: int, block: Callable[[int], list[Slot | Chosen | None]]) -> None:
        self._block_size = block_size
        self._block = block
        # hash of the text, slots before, slots after -> what was chosen of it, by each policy
        self._lists: dict[tuple[int, int, int], set[bytes]] = defaultdict(set)

    def weigh(self, row: Row, weighing: Weighing, prefix: int) -> Weighed:
        """The mass tells which queries are counted: it must be all, once each. `prefix`: the text before the row."""
        position, end = row.start + weighing.first, row.start + len(row.token_ids)
        for token in row.token_ids[: weighing.first]:
            prefix = extend_hash(prefix, token)
        begin = position
        if weighing.mass:
            begin, counted, text = struct.unpack("<QQQ", weighing.mass)
            assert counted == position, f"{row.request_id}: queries up to {counted} are counted, not up to {position}"
            assert text == prefix, f"{row.request_id}: the queries of another text are counted"
        for token in row.token_ids[weighing.first :]:
            prefix = extend_hash(prefix, token)
        mass = struct.pack("<QQQ", begin, end, prefix)
        if weighing.choice is None:
            return Weighed(mass)
        num_slots = end - row.dropped[1]
        keep_list = choose(prefix, num_slots, weighing.choice)
        self._lists[prefix, num_slots, weighing.choice.num_kept].add(keep_list)
        return Weighed(mass, keep_list)

    def compact(self, compaction: Compaction) -> None:
        """Each head's slots move to the front of the targets."""
        lists = array("I", compaction.keep_list)
        count, num_slots = compaction.num_kept, compaction.num_slots
        found = []
        for table in compaction.sources:
            slots = [self._at(table, index) for index in range(num_slots)]
            last = slots[-1]
            assert isinstance(last, Slot), "two choices without a token between them"
            known = self._lists[last.prefix, num_slots, count]
            assert compaction.keep_list in known, f"at position {last.position} something else was chosen"
            heads = [lists[head * count : (head + 1) * count] for head in range(NUM_HEADS)]
            found.append([tuple(_of_head(slots[row[i]], head) for head, row in enumerate(heads)) for i in range(count)])
        for table, kept in zip(compaction.targets, found, strict=True):
            assert len(table) == -(-count // self._block_size), f"{len(table)} blocks for {count} slots"
            padded = [*kept, *[None] * (len(table) * self._block_size - count)]
            for index, block_id in enumerate(table):
                self._block(block_id)[:] = padded[index * self._block_size : (index + 1) * self._block_size]

    def read(self, row: Row, table: BlockTable, text: Sequence[int] | None) -> int:
        """All slots before a row: chosen ones, in each head in their order, then all tokens since. Gives their hash."""
        name, num_slots = row.request_id, row.start - row.dropped[1]
        hashes = [0]
        for token in text or ():
            hashes.append(extend_hash(hashes[-1], token))
        slots = [self._at(table, index) for index in range(num_slots)]
        num_chosen = sum(not isinstance(slot, Slot) for slot in slots)
        assert num_chosen, f"{name}: tokens are gone, and nothing was chosen"
        assert all(isinstance(slot, Slot) for slot in slots[num_chosen:]), f"{name}: chosen slots behind later tokens"
        for head in range(NUM_HEADS):
            positions = [_of_head(slot, head).position for slot in slots]
            assert all(a < b for a, b in itertools.pairwise(positions)), f"{name}: out of order"
            later = list(range(row.start - num_slots + num_chosen, row.start))
            assert positions[num_chosen:] == later, f"{name}: tokens after the choice are not all there"
            for slot in (_of_head(one, head) for one in slots):
                if text is not None:
                    assert slot.token == text[slot.position], f"{name}: a foreign token stands at {slot.position}"
                    expected = hashes[slot.position + 1]
                    assert slot.prefix == expected, f"{name}: what stands at {slot.position} belongs to another text"
        return _of_head(slots[-1], 0).prefix if text is None else hashes[row.start]

    def _at(self, table: BlockTable, index: int) -> Slot | Chosen:
        slot = self._block(table[index // self._block_size])[index % self._block_size]
        assert slot is not None, f"nothing was written in slot {index}"
        return slot


def choose(prefix: int, num_slots: int, choice: Choice) -> bytes:
    """Slots that each head keeps, one head after the other."""
    lists = array("I")
    older = num_slots - choice.num_recent
    for head in range(NUM_HEADS):
        chance = random.Random(f"{prefix} {num_slots} {head} {choice}")
        lists.extend(sorted(chance.sample(range(older), choice.num_kept - choice.num_recent)))
        lists.extend(range(older, num_slots))
    return lists.tobytes()


def _of_head(slot: Slot | Chosen, head: int) -> Slot:
    return slot if isinstance(slot, Slot) else slot[head]
