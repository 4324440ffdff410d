"""The bytes of the KV cache, as pure functions: the planner prints what the engine allocates by (law 2).

Standard library only. It knows sizes, not layouts: what a format takes is in `kv_bytes`, how a block is laid out in
`kv_formats`. How layers come together in groups is decided in `kv_groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv_bytes import FORMAT_BYTES, TILE_TOKENS, vector_bytes
from octavo.errors import ConfigError, MemoryBudgetError

GROUP_KINDS = ("pair", "latent", "tail")


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers with the same geometry and life. A block of the group holds `block_size` tokens of all its layers."""

    name: str
    layer_indices: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    kv_format: str
    window: int | None = None  # tokens that a row reads, itself included; None: all
    # "pair": K and V of each KV head; "latent": one vector of head_dim numbers, counted once; "tail": K of each KV head
    # where the format of the same layers' "pair" quantises whole tiles; only rows of the same block read it, and so a
    # sequence keeps no block of it but the one that it fills
    kind: str = "pair"
    padding_bytes_per_token: int = 0  # unused, so that blocks of all groups have the same number of bytes

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ConfigError(f"a KV group's kind is {self.kind!r}; it must be one of {', '.join(GROUP_KINDS)}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"the attention window of {self.name} is {self.window} tokens; it must be at least 1")
        if self.kind == "tail" and self.window is None:
            raise ConfigError(f"{self.name} is a tail without a window; its rows read {TILE_TOKENS} tokens at most")
        if self.kind == "latent" and self.num_kv_heads != 1:
            raise ConfigError(f"{self.name} has {self.num_kv_heads} latents per token; it must be 1")

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self.num_kv_heads * vector_bytes(self.kv_format, self.head_dim, self.kind)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group, without padding."""
        return len(self.layer_indices) * self.layer_bytes_per_token

    def num_blocks_behind(self, block_size: int) -> int | None:
        """Full blocks before the one that is being filled that a sequence keeps; None: all of them.

        The row at position p reads from p - window + 1 on. With k full blocks, the next row stands at k * block_size or
        later; so block k - ceil((window - 1) / block_size) is the first that is ever read again. Counting from the
        start of the unfilled block keeps what a hit needs at the last block's edge, and one block is kept at least.
        """
        if self.kind == "tail":
            return 0
        return None if self.window is None else max(1, -(-(self.window - 1) // block_size))

    def blocks_for_tokens(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """The most blocks that a sequence holds on its way to so many tokens, in steps of at most `step_tokens`."""
        covering = -(-num_tokens // block_size)
        behind = self.num_blocks_behind(block_size)
        if behind is None:
            return covering
        return min(covering, behind + -(-(block_size - 1 + step_tokens) // block_size))


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that decides the size of a model's cache."""

    groups: tuple[KVGroupSpec, ...]
    block_size: int
    why_uncounted: str | None = None  # why the model does not count what its attention looks at; None: it does

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a KV spec needs at least one group of layers")
        if len({group.bytes_per_token + group.padding_bytes_per_token for group in self.groups}) != 1:
            raise ConfigError("blocks of all KV groups must have the same number of bytes; pad the smaller ones")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, while no window has passed it; without padding and tails."""
        return sum(group.bytes_per_token for group in self.groups if group.kind != "tail")

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes that each further token of a long sequence takes: of the layers that keep all tokens, with padding."""
        return sum(g.bytes_per_token + g.padding_bytes_per_token for g in self.groups if g.window is None)

    @property
    def padding_bytes_per_block(self) -> int:
        """Bytes that nobody uses, in a block of each group."""
        return self.block_size * sum(group.padding_bytes_per_token for group in self.groups)

    @property
    def has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    @property
    def why_all_are_kept(self) -> str | None:
        """Why requests on this model cannot have a policy that drops tokens; None: they can."""
        by_tiles = {group.kv_format for group in self.groups if FORMAT_BYTES[group.kv_format].tail_format is not None}
        if by_tiles:
            return f"quantises keys by whole tiles (KV format {', '.join(by_tiles)})"
        if self.has_windows:
            return "has attention windows of its own"
        return "keeps latents" if any(group.kind != "pair" for group in self.groups) else None

    def why_not(self, *, chooses: bool) -> str | None:
        """Why requests cannot have a policy that drops tokens (`chooses`: by attention); None: they can."""
        return self.why_all_are_kept or (self.why_uncounted if chooses else None)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool; the same for every group."""
        return (self.groups[0].bytes_per_token + self.groups[0].padding_bytes_per_token) * self.block_size

    def num_blocks(self, budget_bytes: int) -> int:
        """How many blocks a budget buys; at least one."""
        count = budget_bytes // self.bytes_per_block
        if count < 1:
            raise MemoryBudgetError(
                f"a KV cache of {budget_bytes} bytes holds no block: one block of {self.block_size} tokens has "
                f"{self.bytes_per_block} bytes; raise --kv-cache-memory to at least that"
            )
        return count

    def pool_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.bytes_per_block

    def blocks_for_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most blocks that a sequence holds on its way to so many tokens, over all groups.

        Steps have at most `step_tokens` tokens; with 1 it is what decoding needs, and no less than what is held
        between two steps of any size. Only windows make a difference.
        """
        return sum(group.blocks_for_tokens(num_tokens, self.block_size, step_tokens) for group in self.groups)

    def own_blocks(self, num_tokens: int, shared_tokens: int, step_tokens: int) -> int:
        """The most blocks that a branch holds alone on its way to `num_tokens`, when it shares the full blocks of the
        first `shared_tokens` with others."""
        size = self.block_size
        apart = -(-num_tokens // size) - shared_tokens // size
        return sum(min(apart, group.blocks_for_tokens(num_tokens, size, step_tokens)) for group in self.groups)

    def branch_blocks(self, num_tokens: int, shared_tokens: int, step_tokens: int, width: int) -> tuple[int, int]:
        """The most blocks that `width` such branches hold together: those that they share, and those of each alone."""
        size, shared, own = self.block_size, 0, 0
        full, apart = shared_tokens // size, -(-num_tokens // size) - shared_tokens // size
        for group in self.groups:
            most = group.blocks_for_tokens(num_tokens, size, step_tokens)
            common = min(full, group.blocks_for_tokens(shared_tokens, size, step_tokens))
            if common + width * min(apart, most) < width * most:
                shared, own = shared + common, own + min(apart, most)
            else:
                own += most
        return shared, own

    def longest_tokens(self, num_blocks: int, step_tokens: int, limit: int) -> int:
        """The longest sequence, up to `limit`, that fits so many blocks; a multiple of the block size below it."""
        if self.blocks_for_tokens(limit, step_tokens) <= num_blocks:
            return limit
        low, high = 0, -(-limit // self.block_size)  # in blocks of tokens: fits, does not fit
        while high - low > 1:
            middle = (low + high) // 2
            if self.blocks_for_tokens(middle * self.block_size, step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle
        return low * self.block_size
