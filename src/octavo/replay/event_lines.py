"""Core events as plain lists, to be written, compared and counted. Tokens, keys, names and texts are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core import events

# What is said of blocks; the rest is about requests.
BLOCK_EVENTS = ("attach", "grow", "commit", "copy", "fork", "evict", "preempt", "release")


def event_line(event: events.Event, name: Callable[[str], str]) -> list[Any]:
    """`name` gives the request's name in the recording. The first entry is the kind."""
    match event:
        case events.RequestAdded():
            return ["add", name(event.request_id), event.num_prompt_tokens, event.priority]
        case events.StepStarted():
            return ["step", event.step_index]
        case events.RequestWaits():
            return ["wait", name(event.request_id), name(event.computing_id), event.num_blocks]
        case events.RequestAdmitted():
            counts = [event.num_known_tokens, event.num_matched_tokens, event.num_hit_tokens]
            return ["admit", name(event.request_id), *counts]
        case events.PrefixAttached():
            return ["attach", name(event.request_id), _lists(event.block_tables)]
        case events.BlocksGrown():
            return ["grow", name(event.request_id), _lists(event.block_tables)]
        case events.BlocksCopied():
            copied = [list(event.sources), list(event.targets), event.num_tokens, event.on_write]
            return ["copy", name(event.request_id), *copied]
        case events.BlocksCommitted():
            added = [list(block.block_ids) for block in event.blocks]
            above = [event.num_blocks_before, list(event.parent_block_ids)]
            twins = [list(twin.block_ids) for twin in event.twins]
            return ["commit", name(event.request_id), *above, added, twins]
        case events.BlocksEvicted():
            return ["evict", _lists(event.blocks)]
        case events.BlocksPassed():
            return ["pass", name(event.request_id), _lists(event.block_tables)]
        case events.BlocksDropped():
            return ["drop", name(event.request_id), event.first, _lists(event.block_tables)]
        case events.BlocksReleased():
            return ["release", name(event.request_id), _lists(event.block_tables)]
        case events.RequestForked():
            return ["fork", name(event.parent_id), name(event.child_id), _lists(event.block_tables)]
        case events.RequestPreempted():
            return ["preempt", name(event.request_id), event.num_computed_tokens]
        case events.RequestFinished():
            out = event.output
            return ["finish", name(out.request_id), out.finish_reason, out.num_output_tokens, event.num_preemptions]


def _lists(tables: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(table) for table in tables]


class ResidentBlocks:
    """A listener that knows which blocks a prefix can hit, from commits and evictions alone."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.BlocksCommitted):
            for block in event.blocks:
                assert not self.blocks & _present(block.block_ids), "a block is committed that is resident"
            for block in (*event.twins, *event.blocks):  # of a twin, blocks of the request's own may have taken a place
                self.blocks |= _present(block.block_ids)
        elif isinstance(event, events.BlocksEvicted):
            for node in event.blocks:
                assert self.blocks >= _present(node), "a block is evicted that is not resident"
                self.blocks -= _present(node)


def _present(block_ids: tuple[int, ...]) -> set[int]:
    """Without the places of blocks that a window has passed."""
    return {block_id for block_id in block_ids if block_id >= 0}
