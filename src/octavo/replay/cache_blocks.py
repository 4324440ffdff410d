"""A trace's requests as blocks of a cache: which names are looked up, and what each is worth. It knows no cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from zlib import crc32

from octavo.errors import ConfigError
from octavo.replay.hit_curve import NUM_GROUPS
from octavo.replay.trace import TraceRequest, block_keys

_MASK = (1 << 64) - 1
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """Names of what is looked up, in order, and of what the request leaves behind it."""

    names: list[Hashable]
    produced: list[Hashable]
    last_tokens: int  # tokens in the last block that is looked up; all others are full


def block_size_of(request: TraceRequest, asked: int | None) -> int:
    """Tokens of a block: what was asked for, else what the trace names blocks of, else the engine's own."""
    return asked or request.block_tokens or DEFAULT_BLOCK_SIZE


def named_blocks(request: TraceRequest, block_size: int) -> NamedBlocks:
    """Raises ConfigError where the trace's blocks cannot be cut or joined to this size.

    Of a text that is known only full blocks can be found again, as in the engine. Of a trace that names blocks the
    last one counts as well, though it may be filled in part: that is how such traces are published.
    """
    if request.prompt_token_ids is not None:
        return _of_tokens(request, block_size)
    if not request.block_ids:
        return NamedBlocks([], [], 0)
    ids = _of_ids(request, block_size)
    last = request.num_prompt_tokens - (len(ids) - 1) * block_size
    return NamedBlocks(ids, [], max(1, min(last, block_size)))


def _of_ids(request: TraceRequest, block_size: int) -> list[Hashable]:
    ids, size, space = request.block_ids, request.block_tokens, request.namespace
    if size == block_size:
        return [(space, name) for name in ids] if space else list(ids)
    if size % block_size == 0:
        parts = size // block_size
        count = -(-request.num_prompt_tokens // block_size)
        parted: list[Hashable] = [(space, name, part) for name in ids for part in range(parts)]
        return parted[:count]
    if block_size % size == 0:
        step = block_size // size
        joined: list[Hashable] = [(space, ids[min(start + step, len(ids)) - 1]) for start in range(0, len(ids), step)]
        return joined
    raise ConfigError(
        f"--block-size is {block_size}, but the trace names blocks of {size} tokens; choose a size that divides "
        f"{size}, or a multiple of it"
    )


def _of_tokens(request: TraceRequest, block_size: int) -> NamedBlocks:
    assert request.prompt_token_ids is not None
    text = request.prompt_token_ids
    num_full = len(text) // block_size
    if request.output_token_ids:
        text = text + request.output_token_ids[:-1]  # the last token is never computed
    root = request.namespace.encode()
    names: list[Hashable] = [*block_keys(text[: len(text) // block_size * block_size], block_size, root[:64])]
    return NamedBlocks(names[:num_full], names[num_full:], block_size)


def check_rate(rate: float) -> None:
    if not 0.0 < rate <= 1.0:
        raise ConfigError(f"--sample is {rate}; it must be above 0 and at most 1 (0.01 looks at one block in 100)")


class BlockSample:
    """Which blocks are in a sample: a function of their names, the same in every process."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        check_rate(rate)
        self.rate = rate
        self._threshold = int(rate * (1 << 32))
        self._seed = seed

    def group(self, name: Hashable) -> int:
        """The part of the sample that a block is in; NEVER (-1) where it is in none."""
        mixed = _mix(number_of(name) + self._seed)
        return (mixed >> 32) % NUM_GROUPS if mixed & 0xFFFFFFFF < self._threshold else -1


def number_of(name: Hashable) -> int:
    if isinstance(name, int):
        return name
    if isinstance(name, bytes):
        return int.from_bytes(name[:8], "little")
    if isinstance(name, tuple):
        number = 0
        for part in name:
            number = _mix(number + number_of(part))
        return number
    return crc32(str(name).encode())


def _mix(number: int) -> int:
    """splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
