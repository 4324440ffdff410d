"""What branches of a request save by sharing blocks, on lengths of a trace: samples, and beams of recorded fork trees.

The saving is that of Kwon et al. 2023 (section 6.3): blocks saved by sharing, of the blocks that there would be without
it, in the mean over the time that requests run: each step counts once, so a long answer counts more than a short one.
It knows blocks by number only.
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
    blocks: float  # of a running request, with sharing: mean over time
    blocks_without: float
    saved_share: float
    saved_share_by_request: float  # the same where each request counts once, however long it runs


@dataclass(slots=True)
class _Sums:
    """Blocks, with and without sharing, at times of requests; weighted by steps, and each request alike."""

    held: float = 0.0
    without: float = 0.0
    steps: int = 0
    held_alike: float = 0.0
    without_alike: float = 0.0

    def add(self, one: Lengths, counted: Sequence[tuple[int, int]]) -> None:
        """counted: (with sharing, without) at evenly spread steps."""
        held, without = (sum(column) / len(counted) for column in zip(*counted, strict=True))
        self.held += held * one.output
        self.without += without * one.output
        self.steps += one.output
        self.held_alike += held
        self.without_alike += without

    def saving(self, kind: str, branches: int) -> Saving:
        steps = max(1, self.steps)
        return Saving(
            kind,
            branches,
            self.held / steps,
            self.without / steps,
            1.0 - self.held / self.without if self.without else 0.0,
            1.0 - self.held_alike / self.without_alike if self.without_alike else 0.0,
        )


def study_samples(load: Sequence[Lengths], branches: int, block_size: int) -> Saving:
    """All branches share the full blocks of the prompt; the block that they part in each copies."""
    sums = _Sums()
    for one in load:
        counted = []
        for length in _times(one.output):
            total = -(-(one.prompt + length) // block_size)
            shared = min(one.prompt // block_size, total)
            counted.append((shared + branches * (total - shared), branches * total))
        sums.add(one, counted)
    return sums.saving("samples", branches)


def study_beams(load: Sequence[Lengths], trees: Sequence[ForkTree], block_size: int) -> Saving:
    """trees: of one width; requests take them in turn."""
    width = trees[0].width
    sums = _Sums()
    for number, one in enumerate(load):
        tree, counted = trees[number % len(trees)], []
        for length in _times(one.output):
            held = beam_blocks(tree, one.prompt, length, block_size)
            counted.append((held, width * -(-(one.prompt + length) // block_size)))
        sums.add(one, counted)
    return sums.saving("beams", width)


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
    """Steps in the middle of as many equal parts of an answer."""
    count = min(_POINTS, output)
    return [1 + (2 * at + 1) * output // (2 * count) if count < output else 1 + at for at in range(count)]
