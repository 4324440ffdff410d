"""KV groups for tests of the core, by the window of each, and what a text holds of them."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.kv_spec import KVGroupSpec, KVSpec

Windows = Sequence[int | None]  # of each KV group; None: all tokens are kept; 0: those of the block that fills (a tail)


def kv_spec(block_size: int, windows: Windows = (None,)) -> KVSpec:
    pairs = [KVGroupSpec(f"group{g}", (g,), 1, 16, "bf16", window=one) for g, one in enumerate(windows) if one != 0]
    tail = KVGroupSpec("tail", (0,), 1, 16, "bf16", window=16, kind="tail", padding_bytes_per_token=32)
    groups = iter(pairs)
    return KVSpec(tuple(tail if one == 0 else next(groups) for one in windows), block_size)


def blocks_behind(window: int, block_size: int) -> int:
    """Full blocks that a window keeps: those of the window - 1 tokens before a block's edge; at least one; 0: none."""
    if not window:
        return 0
    return max(1, len({(10**6 * block_size - back) // block_size for back in range(1, window)}))


def most_blocks(windows: Windows, block_size: int, num_tokens: int, budget: int) -> list[int]:
    """The most blocks that a text of so many tokens needs in each group."""
    covering, step = -(-num_tokens // block_size), -(-(block_size - 1 + budget) // block_size)
    return [covering if one is None else min(covering, blocks_behind(one, block_size) + step) for one in windows]
