"""The bytes of the KV cache, as pure functions: the planner prints what the engine allocates by (law 2).

Standard library only. It knows sizes, not layouts; how a block is laid out is in `kv_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError, MemoryBudgetError

FORMAT_BYTES = {"f32": 4, "bf16": 2}  # KV format -> bytes of one stored number
GROUP_KINDS = ("pair", "latent")


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers with the same geometry and life. A block of the group holds `block_size` tokens of all its layers."""

    name: str
    layer_indices: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    kv_format: str
    window: int | None = None  # tokens that a row reads, itself included; None: all
    kind: str = "pair"  # "pair": K and V of each KV head; "latent": one vector of head_dim numbers, counted once

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ConfigError(f"a KV group's kind is {self.kind!r}; it must be one of {', '.join(GROUP_KINDS)}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"the attention window of {self.name} is {self.window} tokens; it must be at least 1")
        if self.kind == "latent" and self.num_kv_heads != 1:
            raise ConfigError(f"{self.name} has {self.num_kv_heads} latents per token; it must be 1")

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        vectors = 2 if self.kind == "pair" else 1
        return vectors * self.num_kv_heads * self.head_dim * FORMAT_BYTES[self.kv_format]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        return len(self.layer_indices) * self.layer_bytes_per_token


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that decides the size of a model's cache."""

    groups: tuple[KVGroupSpec, ...]
    block_size: int

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a KV spec needs at least one group of layers")
        if len({group.bytes_per_token for group in self.groups}) != 1:
            raise ConfigError("blocks of all KV groups must have the same number of bytes")

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool; the same for every group."""
        return self.groups[0].bytes_per_token * self.block_size

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

    def blocks_for_tokens(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens needs, over all groups."""
        return -(-num_tokens // self.block_size) * len(self.groups)
