"""Which layers to leave out of a format that is too coarse for all of them: the most sensitive first, and no more than
must be.

How sensitive a layer is, is what it costs to have that layer alone in the format. It does not know paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.certify.limits import Limits
from octavo.certify.measure import PathResult
from octavo.certify.setting import Setting

NUM_REFINED = 3  # numbers of layers that are tried between one that is too few and one that is enough

MeasureSample = Callable[[Sequence[Setting]], list[PathResult]]
MakeSetting = Callable[[tuple[int, ...]], Setting]


@dataclass(frozen=True, slots=True)
class Search:
    """What the search may use."""

    measure: MeasureSample  # each setting on a sample of the text
    setting: MakeSetting  # the format with these layers left out
    num_layers: int
    limits: Limits
    fewer_bytes_than: int  # a token: a mix of so many is of no use


def find_mixes(search: Search) -> list[Setting]:
    """Mixes that keep the limits on the sample, smallest first, to be measured whole; empty where there is none."""
    every = tuple(range(search.num_layers))
    alone = search.measure([search.setting(tuple(one for one in every if one != index)) for index in every])
    order = sorted(every, key=lambda index: (-alone[index].distance.kl_mean, index))

    def mix(count: int) -> Setting:
        return search.setting(tuple(sorted(order[:count])))

    def kept(counts: Sequence[int]) -> list[int]:
        settings = [mix(count) for count in counts]
        results = search.measure(settings) if settings else []
        return [
            count
            for count, result in zip(counts, results, strict=True)
            if not search.limits.broken_by({"cold": result}, None, None)
        ]

    useful = [count for count in every[1:] if mix(count).bytes_per_token < search.fewer_bytes_than]
    coarse = [count for count in useful if count & (count - 1) == 0 or count == useful[-1]]
    enough = kept(coarse)
    if not enough:
        return []
    below = [count for count in useful if count < enough[0] and count > enough[0] // 2]
    step = -(-len(below) // NUM_REFINED) if below else 1
    found = [*kept(below[::step]), *enough]
    return sorted((mix(count) for count in found), key=lambda one: one.bytes_per_token)
