"""Keeping tokens by attention: the counts between steps, the choice, and moving what is kept.

A mass is int64 [num_layers, num_kv_heads, num_slots] as bytes, in units of 1 / MASS_UNITS; a keep-list is one bit for
each slot of each layer and KV head. It does not know which policy asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.selection import Choice
from octavo.core.step import Compaction, Row, Weighed
from octavo.kernels.ops import I32, I64, KVLayer, WeighedRows
from octavo.kv_formats.token_bytes import TokenMover

Bools = npt.NDArray[np.bool_]


class Selector:
    """For the layers of one cache, which all have the same number of KV heads."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        self._layers = layers
        self._num_heads = layers[0].num_kv_heads
        self._movers: dict[str, TokenMover] = {}  # by KV format

    def weighed_rows(self, rows: Sequence[Row]) -> tuple[WeighedRows, ...]:
        """Room for the counts of a step's rows, with what earlier steps counted."""
        found = []
        for sequence, row in enumerate(rows):
            weighing = row.weighing
            if weighing is not None:
                start = row.start - row.dropped[1]
                mass = np.zeros((len(self._layers), self._num_heads, start + len(row.token_ids)), np.int64)
                if weighing.mass:
                    before = np.frombuffer(weighing.mass, np.int64).reshape(*mass.shape[:2], -1)
                    assert before.shape[2] == start + weighing.first, f"{row.request_id}: a mass of other slots"
                    mass[:, :, : before.shape[2]] = before
                found.append(WeighedRows(sequence, weighing.first, mass))
        return tuple(found)

    def weighed(self, row: Row, rows: WeighedRows) -> Weighed:
        """What goes back into the core after the step."""
        assert row.weighing is not None
        mass, choice = rows.mass, row.weighing.choice
        assert mass.any(axis=2).all(), "the model's forward pass does not count its attention"
        if choice is None:
            return Weighed(mass.tobytes())
        kept = choose(mass, choice)
        return Weighed(mass[kept].tobytes(), np.packbits(kept).tobytes())

    def compact(self, compaction: Compaction) -> None:
        """Move what is kept to the front of its new blocks. Reads all of a layer's slice before it writes there."""
        shape = (len(self._layers), self._num_heads, compaction.num_slots)
        assert compaction.keep_list, "a keep-list of an executor that computes nothing"
        bits = np.unpackbits(np.frombuffer(compaction.keep_list, np.uint8), count=int(np.prod(shape)))
        slots = np.nonzero(bits.reshape(shape))[2].reshape(*shape[:2], -1)
        assert slots.shape[2] == compaction.num_kept, "a keep-list of another length"
        sources, targets = (_tables(tables) for tables in (compaction.sources, compaction.targets))
        front = np.broadcast_to(np.arange(compaction.num_kept), slots.shape[1:])
        # A block of one group may become another's; within a group, layers have slices of their own.
        at_once = 1 if len(sources) == 1 else len(self._layers)
        for first in range(0, len(self._layers), at_once):
            layers = self._layers[first : first + at_once]
            found = [
                self._mover(kv).gather(kv, sources[kv.group], slots[index]) for index, kv in enumerate(layers, first)
            ]
            for kv, units in zip(layers, found, strict=True):
                self._mover(kv).scatter(kv, targets[kv.group], front, units)

    def _mover(self, kv: KVLayer) -> TokenMover:
        mover = self._movers.get(kv.kv_format)
        if mover is None:
            mover = self._movers[kv.kv_format] = TokenMover(kv)
        return mover


def choose(mass: I64, choice: Choice) -> Bools:
    """Which slots stay, [num_layers, num_kv_heads, num_slots]: num_kept of each head. Among equals the first stay."""
    scores = scores_of(mass, choice)
    count = choice.num_kept - choice.num_recent
    kept = np.zeros(mass.shape, np.bool_)
    kept[:, :, mass.shape[2] - choice.num_recent :] = True
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, :count]
    np.put_along_axis(kept, best, True, axis=2)
    return kept


def scores_of(mass: I64, choice: Choice) -> I64:
    """[num_layers, num_kv_heads, slots that are not recent]: sums over `kernel` neighbours, with zeros beyond the ends.

    The average of the neighbours is that sum over their number, which changes no order: so whole numbers stay.
    """
    older = mass[:, :, : mass.shape[2] - choice.num_recent]
    reach = choice.kernel // 2
    padded = np.pad(older, ((0, 0), (0, 0), (reach, reach)))
    total: I64 = np.zeros_like(older)
    for offset in range(choice.kernel):
        total += padded[:, :, offset : offset + older.shape[2]]
    return total


def _tables(tables: Sequence[Sequence[int]]) -> list[I32]:
    return [np.array(table, np.int32) for table in tables]
