"""What a model is made of, for memory and arithmetic: its tensors by size, and what its cache keeps of a token.

Plain numbers, from whatever file they came. It does not know files, engines or hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that stands in each of some layers, or once outside of them; experts are copies of one tensor."""

    name: str  # as in the checkpoint; "{}" stands for the layer
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()  # (): once, outside the layers
    copies: int = 1  # experts
    used: int = 1  # how many of the copies a token goes through
    stored: str = ""  # how a file has it, where one was read
    role: str = "matrix"  # "matrix" multiplies every token; "lookup" is read by rows; "vector" is added or scales

    @property
    def numbers(self) -> int:
        """Of one copy in one layer."""
        return math.prod(self.shape)

    @property
    def is_of_vocabulary(self) -> bool:
        """The embedding or the head."""
        return self.name in (EMBEDDING, HEAD)

    @property
    def count(self) -> int:
        return max(1, len(self.layers)) * self.copies

    @property
    def parameters(self) -> int:
        return self.numbers * self.count

    @property
    def used_parameters(self) -> int:
        """Of the copies that one token goes through."""
        return self.numbers * max(1, len(self.layers)) * self.used


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same of a token, for the same time.

    `kind`: "full" (all tokens), "window" (the last `window` tokens), "chunk" (tokens of the current chunk of `window`),
    "latent" (one vector for all heads, all tokens), "state" (nothing per token, a fixed state per sequence), "tail" (K
    of the block that a sequence fills, beside a group whose format quantises whole tiles).
    """

    name: str
    kind: str
    layer_indices: tuple[int, ...]
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0  # 0: K and V are one and the same vector
    window: int | None = None
    tokens_per_entry: int = 1  # above 1: so many tokens are compressed into one entry
    index_dim: int = 0  # numbers of a sparse-attention index key per entry
    index_heads: int = 0  # that score such a key
    read_tokens: int | None = None  # sparse attention: a row reads the entries of so many tokens, chosen by the index
    state_numbers: int = 0  # of a recurrent state, per layer and sequence, in `state_dtype`
    conv_numbers: int = 0  # of a convolution's tail, per layer and sequence, in the model's dtype
    state_dtype: str = "f32"
    kv_format: str | None = None  # None: the cache's own

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    @property
    def numbers_per_entry(self) -> int:
        """Numbers of K and V (or of the latent) that one layer keeps of one entry, without an index key."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def entries(self, num_tokens: int) -> int:
        """What one sequence of so many tokens has in one layer."""
        if self.kind == "state":
            return 0
        if self.window is not None:
            num_tokens = min(num_tokens, self.window)
        return num_tokens // self.tokens_per_entry

    @property
    def seen_tokens(self) -> int | None:
        """Of how many tokens a row reads the entries at most; None: of all."""
        limits = [limit for limit in (self.window, self.read_tokens) if limit is not None]
        return min(limits) if limits else None

    def read_entries(self, num_tokens: int) -> int:
        """Entries in one layer that a row after so many tokens reads."""
        if self.kind == "state":
            return 0
        seen = self.seen_tokens
        return (num_tokens if seen is None else min(num_tokens, seen)) // self.tokens_per_entry


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the file stores its weights where that is not the model's dtype, and its cache where it says so."""

    name: str  # as its maker calls it: "fp8", "nvfp4", "mxfp4", "int4", "mixed"
    scheme: str | None  # storage of matrices that no rule names; None: they stay in the model's dtype
    rules: tuple[tuple[str, str | None], ...] = ()  # (pattern of names, storage or None); the first that fits counts
    kv_format: str | None = None
    targets: tuple[str, ...] = ()  # only these patterns are quantised by `scheme`; (): all but the embedding


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model in numbers."""

    model: str
    architecture: str
    family: str
    attention: str  # "MHA", "MQA", "GQA", "MLA", and what layers do: "GQA + window"
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_context: int
    dtype: str  # "f32", "f16", "bf16": of what is not quantised
    groups: tuple[KVGroup, ...]
    tensors: tuple[Tensor, ...]
    quantisation: Quantisation | None = None
    score_heads: int = 0  # heads that score a key; 0: num_heads
    score_dim: int = 0  # numbers of a query that meet a key
    mix_dim: int = 0  # numbers of a value that are mixed
    exact: bool = True  # whether every tensor is known; where not, `notes` says which are not
    notes: tuple[str, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict)  # the config, for the engines that read more of it
    stored_bytes: int | None = None  # of the weights, where the file's own header told
    stored_dtype: str = ""  # of most of them, where it did

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        """Those that a step reads whole: no lookups, but for an embedding that is the head as well."""
        has_own_head = any(each.name == "lm_head.weight" for each in self.tensors)
        return tuple(
            each
            for each in self.tensors
            if each.role != "lookup" or (not has_own_head and each.name == "model.embed_tokens.weight")
        )

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through: of experts only the chosen ones."""
        return sum(tensor.used_parameters for tensor in self.tensors)
