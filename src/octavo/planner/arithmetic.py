"""Multiply-adds and bytes of generating text, with a cache and without one; bounds of time by a machine's peaks.

The bounds are the roofline's: whatever takes longer, the bytes or the arithmetic. They are no measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.planner.cache_bytes import CacheBytes
from octavo.planner.geometry import Geometry, KVGroup
from octavo.replay.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic of a model. Attention is counted by the keys that a row reads: those of windows are fewer."""

    geometry: Geometry

    @property
    def per_row(self) -> int:
        """Multiply-adds of the matrices for one token, without the head."""
        return sum(each.used_parameters for each in self.geometry.tensors if each.role == "matrix") - self._own_head

    @property
    def _own_head(self) -> int:
        return sum(each.parameters for each in self.geometry.tensors if each.name == "lm_head.weight")

    @property
    def head(self) -> int:
        """Of the head, once per generated token; a head that is tied is the embedding."""
        return self.geometry.vocab_size * self.geometry.hidden_size

    def attention_row(self, num_keys: int) -> int:
        """Of attention for one token that sees so many, itself included: scores and the mix, in all layers."""
        return sum(self.per_key(group) * group.num_layers * group.read_entries(num_keys) for group in self._attending())

    def attention_upto(self, num_tokens: int) -> int:
        """Of attention for all tokens of a text, each of which sees those before it."""
        return sum(
            self.per_key(group) * group.num_layers * _sum_of_entries(group, num_tokens) for group in self._attending()
        )

    def _attending(self) -> list[KVGroup]:
        return [group for group in self.geometry.groups if group.kind != "state"]

    def per_key(self, group: KVGroup) -> int:
        """Multiply-adds of one row with one key: the score and the mix of each head, or an index's scores."""
        if group.kind == "index":
            return group.index_heads * group.index_dim
        return self.geometry.num_heads * (self.geometry.score_dim + self.geometry.mix_dim)

    def prefill(self, num_tokens: int) -> int:
        """A prompt in one go, and the first token after it."""
        return num_tokens * self.per_row + self.attention_upto(num_tokens) + self.head

    def with_cache(self, prompt: int, output: int) -> int:
        """A prompt and so many new tokens, each row computed once."""
        rows = prompt + output - 1
        return rows * self.per_row + self.attention_upto(rows) + output * self.head

    def without_cache(self, prompt: int, output: int) -> int:
        """The same where every new token computes all rows before it again."""
        total = output * self.head
        for num_tokens in range(prompt, prompt + output) if output <= 64 else ():
            total += num_tokens * self.per_row + self.attention_upto(num_tokens)
        if output > 64:
            rows = (prompt + prompt + output - 1) * output // 2
            total += rows * self.per_row + self._attention_sums(prompt, output)
        return total

    def _attention_sums(self, prompt: int, output: int) -> int:
        """The sum of `attention_upto` over the lengths, in closed form."""
        return sum(
            self.per_key(group)
            * group.num_layers
            * (_sum_of_sums(group, prompt + output - 1) - _sum_of_sums(group, prompt - 1))
            for group in self._attending()
        )


def _sum_of_entries(group: KVGroup, num_tokens: int) -> int:
    """Entries that rows 1 to n see in all; compression is taken as even."""
    limit = group.seen_tokens
    inside = num_tokens if limit is None else min(num_tokens, limit)
    seen = inside * (inside + 1) // 2
    if limit is not None:
        seen += (num_tokens - inside) * limit
    return seen // group.tokens_per_entry


def _sum_of_sums(group: KVGroup, num_tokens: int) -> int:
    """The sum of _sum_of_entries over 1 to n."""
    if num_tokens <= 0:
        return 0
    limit = group.seen_tokens
    inside = num_tokens if limit is None else min(num_tokens, limit)
    total = inside * (inside + 1) * (inside + 2) // 6
    if limit is not None and num_tokens > inside:
        beyond = num_tokens - inside
        total += beyond * (inside * (inside + 1) // 2) + limit * (beyond * (beyond + 1) // 2)
    return total // group.tokens_per_entry


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of `batch` sequences of `context` tokens."""

    batch: int
    context: int
    weights_bytes: int
    kv_bytes: int  # that are read
    multiply_adds: int

    @property
    def bytes_read(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.batch

    @property
    def intensity(self) -> float:
        """Multiply-adds per byte."""
        return self.multiply_adds / self.bytes_read

    def seconds(self, hardware: Hardware, ranks: int = 1) -> float:
        """The least that the step can take."""
        return max(
            self.bytes_read / (hardware.bytes_per_s * ranks), 2 * self.multiply_adds / (hardware.flops_per_s * ranks)
        )


def decode_step(geometry: Geometry, cache: CacheBytes, weights_bytes: int, batch: int, context: int) -> Step:
    """What a decode step reads and computes. Of experts those are read that some token of the batch takes."""
    work = Work(geometry)
    share = _share_of_weights_read(geometry, batch)
    return Step(
        batch=batch,
        context=context,
        weights_bytes=round(weights_bytes * share),
        kv_bytes=cache.read(context, batch),
        multiply_adds=batch * (work.per_row + work.head + work.attention_row(context)),
    )


def _share_of_weights_read(geometry: Geometry, batch: int) -> float:
    """By parameters: lookups read a row only; of `copies` experts a batch of n touches 1 - (1 - used/copies)^n."""
    read = 0.0
    for each in geometry.read_tensors:
        touched = 1.0 if each.copies == 1 else 1 - (1 - each.used / each.copies) ** batch
        read += each.parameters * touched
    return read / max(1, geometry.parameters)
