"""Token ids that stand for a trace's prompts: equal where the trace says that prefixes are equal, else different."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from octavo.replay.cache_blocks import number_of
from octavo.replay.trace import TraceRequest

_LOW = 0xFFFFFFFF
_MAX_PLAIN = 0xB0000000  # ids below it are taken as they are


def prompt_tokens(request: TraceRequest, number: int) -> array[int]:
    """`number` tells requests apart that share nothing: those of which only the length is known."""
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    count = request.num_prompt_tokens
    if not request.block_ids:
        return array("I", [number & _LOW]) * count
    tokens, size = array("I"), request.block_tokens
    for name in request.block_ids:
        tokens += _block(name, size)
    del tokens[count:]
    if len(tokens) < count:  # of the rest nothing is known
        tokens += array("I", [number & _LOW]) * (count - len(tokens))
    return tokens


def _block(name: Hashable, size: int) -> array[int]:
    """The first token tells the block apart from its siblings; of a long name the others do as well."""
    if isinstance(name, int) and 0 <= name < _MAX_PLAIN:
        return array("I", [name]) * size
    mixed = number_of(name)
    tokens = array("I", [mixed >> 32 & _LOW]) * size
    tokens[0] = mixed & _LOW
    return tokens
