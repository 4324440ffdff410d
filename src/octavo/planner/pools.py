"""How an engine cuts a cache into blocks, and how many tokens and sequences a budget then holds.

`octavo` is counted as octavo allocates. `vllm`, `sglang` and `llama.cpp` are models of what those engines do by
default, made from their logs and sources; they say so. None of it knows weights or speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from octavo.core.kv_bytes import FORMAT_BYTES, TILE_TOKENS
from octavo.core.kv_groups import Pieces, choose_size
from octavo.errors import ConfigError
from octavo.planner.cache_bytes import entry_bytes, state_bytes, stored_bytes
from octavo.planner.geometry import KVGroup

ENGINES = ("octavo", "vllm", "sglang", "llama.cpp")
BLOCK_SIZES: Mapping[str, int] = {"octavo": 16, "vllm": 16, "sglang": 1, "llama.cpp": 1}
_SGLANG_WINDOW_SHARE = Fraction(4, 5)  # --swa-full-tokens-ratio: what windows get beside the full layers
_V4_TOKENS, _V4_PAGE, _V4_ROPE, _V4_SCALES, _V4_FIXED_BLOCKS = 256, 576, 64, 8, 758
_LLAMACPP_STEP, _LLAMACPP_UBATCH = 256, 512  # its caches grow in steps; --ubatch-size


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What an engine is told about its cache."""

    kv_format: str
    dtype: str  # the model's
    block_size: int
    max_model_len: int  # tokens of the longest sequence
    max_num_batched_tokens: int = 2048
    keeps_states: bool = False  # vLLM with prefix caching of states ("align"): one more block for each


@dataclass(frozen=True, slots=True)
class Part:
    """A group as an engine's blocks hold it: `count` times so many layers, each of `block_tokens` tokens a block."""

    group: KVGroup
    layers: int
    count: int
    block_tokens: int
    block_bytes: int  # used, without what makes blocks of all groups equal


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one size for all groups."""

    engine: str
    parts: tuple[Part, ...]
    bytes_per_block: int
    options: PoolOptions

    @property
    def block_size(self) -> int:
        """Tokens of a block of the group that keeps everything (of the first one, where none does)."""
        return next((part.block_tokens for part in self.parts if part.block_tokens), self.options.block_size)

    @property
    def num_tables(self) -> int:
        return sum(part.count for part in self.parts)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens needs at most."""
        return sum(part.count * self._blocks(part, num_tokens) for part in self.parts)

    def _blocks(self, part: Part, num_tokens: int) -> int:
        group, size = part.group, part.block_tokens
        if group.kind == "state":
            return 2 if self.options.keeps_states else 1
        if group.window is None:
            return -(-num_tokens // size)
        if group.kind == "tail":
            return min(1, num_tokens)
        if self.engine == "vllm":
            batched = self.options.max_num_batched_tokens
            if group.kind == "chunk":
                return -(-min(group.window + batched, num_tokens) // size)
            return -(-min(group.window - 1 + batched, num_tokens) // size) + 1
        if num_tokens <= group.window:
            return -(-num_tokens // size)
        return min(-(-num_tokens // size), -(-(group.window - 1) // size) + 1)

    def longest_tokens(self, num_blocks: int, step_tokens: int, limit: int) -> int:
        """The longest text of octavo's, up to `limit`, that fits so many blocks; whole blocks below the limit.

        While a prompt is computed in steps of so many tokens, a window holds a step more.
        """
        if self._in_steps(limit, step_tokens) <= num_blocks:
            return limit
        low, high = 0, -(-limit // self.block_size)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._in_steps(middle * self.block_size, step_tokens) <= num_blocks
            low, high = (middle, high) if fits else (low, middle)
        return low * self.block_size

    def _in_steps(self, num_tokens: int, step_tokens: int) -> int:
        total = 0
        for part in self.parts:
            size, window = part.block_tokens, part.group.window
            if part.group.kind == "state":
                total += part.count
            elif window is None:
                total += part.count * -(-num_tokens // size)
            else:
                behind = 0 if part.group.kind == "tail" else max(1, -(-(window - 1) // size))
                total += part.count * min(-(-num_tokens // size), behind + -(-(size - 1 + step_tokens) // size))
        return total

    def num_blocks(self, budget_bytes: int) -> int:
        return max(0, budget_bytes // self.bytes_per_block)

    def sequences(self, num_blocks: int, num_tokens: int) -> float:
        """How many sequences of so many tokens so many blocks hold."""
        return num_blocks / self.blocks_for(num_tokens)

    def tokens(self, num_blocks: int) -> int:
        """Tokens that so many blocks hold: where windows or states take part, in sequences of the longest length."""
        if len(self.parts) == 1 and self.parts[0].count == 1 and self.parts[0].group.kind != "state":
            return num_blocks * self.parts[0].block_tokens
        longest = self.options.max_model_len
        return num_blocks * longest // self.blocks_for(longest)


def make_pool(engine: str, groups: tuple[KVGroup, ...], options: PoolOptions) -> Pool:
    """The pool of an engine. Raises ConfigError for an engine that is not known, or a model that keeps nothing."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r} is not one of {', '.join(ENGINES)}")
    if engine == "llama.cpp":
        groups = tuple(group for group in groups if group.kind != "index")  # it scores with the latents themselves
    if not groups:
        raise ConfigError("the model keeps nothing of a token: there is no cache to plan")
    if engine == "vllm" and any(group.tokens_per_entry > 1 for group in groups):
        return _vllm_compressed_pool(groups, options)
    if engine == "vllm":
        return _vllm_pool(groups, options)
    return _equal_pool(engine, (*groups, *_tails(groups, options)) if engine == "octavo" else groups, options)


def _tails(groups: tuple[KVGroup, ...], options: PoolOptions) -> list[KVGroup]:
    """Where a format quantises K by whole tiles: K of the block that each sequence fills, as the engine keeps it."""
    found: dict[tuple[int, int, str], list[int]] = {}
    for group in groups:
        name = group.kv_format or options.kv_format
        tail_format = FORMAT_BYTES[name].tail_format if name in FORMAT_BYTES else None
        if tail_format is not None and group.v_head_dim:
            found.setdefault((group.num_kv_heads, group.head_dim, tail_format), []).extend(group.layer_indices)
    return [
        KVGroup("tail", "tail", tuple(sorted(layers)), heads, dim, window=TILE_TOKENS, kv_format=name)
        for (heads, dim, name), layers in found.items()
    ]


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is put into blocks piece by piece: a layer, or all layers together where their geometry differs."""

    group: KVGroup
    num_bytes: int  # of one piece in a block
    count: int
    layers: int  # of one piece
    tokens: int  # of a block

    @property
    def is_bounded(self) -> bool:
        """Whether a sequence takes no more of it, however long it is."""
        return self.group.window is not None or self.group.kind == "state"


def _equal_pool(engine: str, groups: tuple[KVGroup, ...], options: PoolOptions) -> Pool:
    """Blocks of `block_size` tokens in which layers of one geometry and life lie together, of equal bytes for all.

    How many bytes, the engine's own rule says (`core.kv_groups`).
    """
    states = [group for group in groups if group.kind == "state"]
    units = _units(tuple(group for group in groups if group.kind != "state") or groups, options)
    block_bytes = choose_size(
        [Pieces(unit.num_bytes, unit.count, unit.is_bounded, unit.group.kind != "tail") for unit in units]
    )
    parts = []
    for unit in units:
        tables = -(-unit.count // (block_bytes // unit.num_bytes))
        pieces = -(-unit.count // tables)  # split evenly
        parts.append(Part(unit.group, pieces * unit.layers, tables, unit.tokens, unit.num_bytes * pieces))
    if len(states) < len(groups):
        parts += [_state_part(group, block_bytes, options) for group in states]
    return Pool(engine, tuple(parts), block_bytes, options)


def _state_part(group: KVGroup, block_bytes: int, options: PoolOptions) -> Part:
    """A state is spread over as many blocks as it fills, in one go, for each sequence."""
    num_bytes = _layer_block_bytes(group, options, 0) * group.num_layers
    return Part(group, group.num_layers, -(-num_bytes // block_bytes), 0, min(num_bytes, block_bytes))


def _units(groups: tuple[KVGroup, ...], options: PoolOptions) -> list[_Unit]:
    """Layers one by one; with their index keys, where they have them, all together."""
    lives: dict[object, list[KVGroup]] = {}
    indexed = {(group.window, group.tokens_per_entry) for group in groups if group.kind == "index"}
    for group in groups:
        life = (group.window, group.tokens_per_entry)
        key = life if life in indexed and group.kind != "state" else group
        lives.setdefault(key, []).append(group)
    units = []
    for alike in lives.values():
        size = options.block_size
        first, tokens = alike[0], size * alike[0].tokens_per_entry
        each = [_layer_block_bytes(group, options, size) for group in alike]
        if len(alike) == 1:
            units.append(_Unit(first, each[0], first.num_layers, 1, tokens))
        else:
            total = sum(num_bytes * group.num_layers for num_bytes, group in zip(each, alike, strict=True))
            layers = len({layer for group in alike for layer in group.layer_indices})
            units.append(_Unit(first, total, 1, layers, tokens))
    return units


def _layer_block_bytes(group: KVGroup, options: PoolOptions, size: int) -> int:
    """Bytes of one layer in a block; a state is a block of its own."""
    if group.kind == "state":
        return state_bytes(group, options.dtype, conv_dtype="f32" if options.kv_format == "f32" else None)
    return entry_bytes(group, options.kv_format) * size


def _vllm_pool(groups: tuple[KVGroup, ...], options: PoolOptions) -> Pool:
    """vLLM 0.19: groups of one size of page and one number of layers; states raise the block size of attention."""
    size = options.block_size
    attention = [group for group in groups if group.kind != "state"]
    states = [group for group in groups if group.kind == "state"]
    page = max((entry_bytes(group, options.kv_format) for group in attention), default=0)
    if states and attention:
        wanted = max(state_bytes(group, options.dtype) for group in states)
        size = max(size, -(-wanted // (page * 16)) * 16)
    page_bytes = page * size if attention else max(state_bytes(group, options.dtype) for group in states)
    counts = [group.num_layers for group in groups]
    per_table = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    parts = []
    for group in groups:
        each = entry_bytes(group, options.kv_format) if group.kind != "state" else 0
        tokens = page_bytes // each if each else 0
        used = each * tokens if each else state_bytes(group, options.dtype)
        parts.append(
            Part(group, per_table, -(-group.num_layers // per_table), tokens * group.tokens_per_entry, used * per_table)
        )
    return Pool("vllm", tuple(parts), page_bytes * per_table, options)


def _vllm_compressed_pool(groups: tuple[KVGroup, ...], options: PoolOptions) -> Pool:
    """DeepSeek-V4 in vLLM 0.20: a block holds 256 tokens of half of all layers, in three pages of one size each.

    Pages are padded to multiples of 576 bytes: 64 entries of 4 tokens, 64 index keys, 2 entries of 128 tokens. An
    entry in fp8 has 448 bytes, a rope key in bf16 and 8 bytes of scales. What windows and compressors take of a
    sequence, in blocks, is fitted to its start-up logs (for steps of 2,048 tokens).
    """
    entries = [group for group in groups if group.kind == "latent"]
    dim = entries[0].head_dim
    entry = dim - _V4_ROPE + 2 * _V4_ROPE + _V4_SCALES if options.kv_format == "fp8" else 2 * dim
    index = max((entry_bytes(group, options.kv_format) for group in groups if group.kind == "index"), default=0)
    pages = [_V4_TOKENS // group.tokens_per_entry * entry for group in entries if group.tokens_per_entry > 1]
    pages.append(_V4_TOKENS // min(group.tokens_per_entry for group in groups if group.tokens_per_entry > 1) * index)
    slots = -(-max(group.num_layers for group in entries) // 2)
    block_bytes = slots * sum(-(-page // _V4_PAGE) * _V4_PAGE for page in pages)
    full = Part(entries[0], slots, 1, _V4_TOKENS, slots * sum(pages))
    fixed = KVGroup("windows and states", "state", entries[0].layer_indices)
    rest = Part(fixed, slots, _V4_FIXED_BLOCKS, 0, block_bytes)
    # The group that decides how many tokens a block has is the one that keeps entries of all tokens.
    kept = next(group for group in entries if group.tokens_per_entry > 1)
    return Pool("vllm", (replace(full, group=kept), rest), block_bytes, replace(options, keeps_states=False))


def sglang_tokens(groups: tuple[KVGroup, ...], options: PoolOptions, budget_bytes: int) -> int:
    """Tokens of SGLang's pools: full layers for all of them, windows for four fifths as many."""
    per_token = Fraction(0)
    for group in groups:
        each = Fraction(entry_bytes(group, options.kv_format) * group.num_layers, group.tokens_per_entry)
        per_token += each if group.window is None else each * _SGLANG_WINDOW_SHARE
    return 0 if per_token == 0 else math.floor(budget_bytes / per_token)


def llamacpp_bytes(groups: tuple[KVGroup, ...], options: PoolOptions, context: int, sequences: int) -> int:
    """Bytes that llama.cpp allocates at once for so many sequences of a context: contiguous, windows shorter.

    A latent is kept once, its values are a view of it; an index is not kept; states are in f32.
    """
    total = 0
    for group in groups:
        if group.kind == "index":
            continue
        if group.kind == "state":
            numbers = group.state_numbers + group.conv_numbers
            total += sequences * group.num_layers * stored_bytes(numbers, "f32")
            continue
        cells = context * sequences
        if group.window is not None:
            short = group.window * sequences + _LLAMACPP_UBATCH
            cells = min(cells, -(-short // _LLAMACPP_STEP) * _LLAMACPP_STEP)
        total += entry_bytes(group, options.kv_format) * group.num_layers * (cells // group.tokens_per_entry)
    return total
