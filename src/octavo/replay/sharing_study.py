"""What branches of a request save by sharing blocks, on lengths of a trace: samples, and beams of recorded fork trees.

The saving is that of Kwon et al. 2023 (section 6.3): blocks saved by sharing, of the blocks that there would be without
it, over the time that a request runs. It knows blocks by number only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.replay.allocators import Lengths
from octavo.replay.fork_trees import ForkTree

_POINTS = 12  # times of a request at which its blocks are counted

# Kwon et al. 2023, section 6.3 (figures 14 and 15): (Alpaca, ShareGPT), from the fewest branches to the most.
PUBLISHED = {
    "samples": "6.1% to 9.8% (Alpaca), 16.2% to 30.5% (ShareGPT)",
    "beams": "37.6% to 55.2% (Alpaca), 44.3% to 66.3% (ShareGPT)",
}


@dataclass(frozen=True, slots=True)
class Saving:
    kind: str  # "samples" or "beams"
    branches: int
    blocks: float  # mean over time and requests, with sharing
    blocks_without: float
    saved_share: float


def study_samples(load: Sequence[Lengths], branches: int, block_size: int) -> Saving:
    """All branches share the full blocks of the prompt; the block that they part in each copies."""
    held = without = 0
    for one in load:
        for length in _times(one.output):
            total = -(-(one.prompt + length) // block_size)
            shared = min(one.prompt // block_size, total)
            held += shared + branches * (total - shared)
            without += branches * total
    return _saving("samples", branches, held, without, len(load))


def study_beams(load: Sequence[Lengths], trees: Sequence[ForkTree], block_size: int) -> Saving:
    """trees: of one width; requests take them in turn."""
    width = trees[0].width
    held = without = 0
    for number, one in enumerate(load):
        tree = trees[number % len(trees)]
        for length in _times(one.output):
            held += beam_blocks(tree, one.prompt, length, block_size)
            without += width * -(-(one.prompt + length) // block_size)
    return _saving("beams", width, held, without, len(load))


def beam_blocks(tree: ForkTree, prompt: int, length: int, block_size: int) -> int:
    """Different blocks that the beams hold when each has `length` tokens of its own behind the prompt.

    Two beams share a block that ended while they were still one; the last, unfilled one each has for itself.
    """
    if not length:
        return -(-prompt // block_size)
    total = -(-(prompt + length) // block_size)
    count = tree.width  # of the last block
    ancestors = list(range(tree.width))
    step = length - 1  # beams of this step are the present ones
    for index in range(total - 2, prompt // block_size - 1, -1):
        end = (index + 1) * block_size - prompt - 1  # the step that wrote the block's last token
        while step > end:
            parents = tree.parents_at(step)
            ancestors = [parents[beam] for beam in ancestors]
            step -= 1
        count += len(set(ancestors))
    return count + min(prompt // block_size, total - 1)


def _times(output: int) -> list[int]:
    count = min(_POINTS, output)
    return [1 + (output - 1) * at // max(1, count - 1) for at in range(count)]


def _saving(kind: str, branches: int, held: int, without: int, requests: int) -> Saving:
    points = max(1, requests * _POINTS)
    return Saving(kind, branches, held / points, without / points, 1.0 - held / without if without else 0.0)
