"""Tables beside a plan: the same model with other contexts, batches, formats, windows, heads, ranks; contiguous against
paged; a prefix shared by many. Each row is a plain object.

It asks the plan for every byte and computes none by a formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.planner.cache_bytes import CacheBytes, sharded
from octavo.planner.figures import plain
from octavo.planner.geometry import KVGroup
from octavo.planner.lengths import Lengths
from octavo.planner.plan import Plan

CONTEXTS = (4096, 32768, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FORMAT_CHOICES = ("f32", "bf16", "fp8", "q8_0", "q4_0")
WINDOWS = (1024, 4096, 8192)
RANKS = (1, 2, 4, 8, 16)
OUTPUTS = (16, 128, 1024)
_BLOCK = 16  # of the paged side of a comparison, where the engine itself counts single tokens

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shared:
    """N users behind one prefix of P tokens."""

    users: int = 100
    prefix_tokens: int = 2000


@dataclass(frozen=True, slots=True)
class Comparisons:
    plan: Plan
    shared: Shared = Shared()
    lengths: Lengths | None = None

    def tables(self) -> dict[str, list[Row] | Row]:
        found: dict[str, list[Row] | Row] = {
            "by_context": list(self.by_context()),
            "by_batch": list(self.by_batch()),
            "formats": list(self.formats()),
            "windows": list(self.windows()),
            "heads": list(self.heads()),
            "tensor_parallel": list(self.tensor_parallel()),
            "pipeline_parallel": list(self.pipeline_parallel()),
            "recompute": list(self.recompute()),
            "contiguous": self.contiguous(),
            "prefix_sharing": self.prefix_sharing(),
        }
        if self.lengths is not None:
            found["lengths"] = self.by_lengths(self.lengths)
        return found

    def by_context(self) -> Iterator[Row]:
        """How the cache grows, beside the weights; contexts beyond the model's own are marked."""
        plan = self.plan
        for context in sorted({*CONTEXTS, plan.context}):
            kv_bytes = plan.cache.of(context, plan.request.batch)
            yield {
                "context": context,
                "batch": plan.request.batch,
                "kv_bytes": kv_bytes,
                "times_weights": kv_bytes / plan.weights_bytes if plan.weights_bytes else None,
                "beyond_model": context > plan.geometry.max_context,
            }

    def by_batch(self) -> Iterator[Row]:
        """Bytes, arithmetic and bounds of a decode step, by the number of sequences."""
        plan, hardware = self.plan, self.plan.request.hardware
        if not plan.weights_bytes:
            return
        for batch in sorted({*BATCHES, plan.request.batch}):
            step = plan.step_of(batch)
            row: Row = {
                "batch": batch,
                "kv_bytes": step.kv_bytes,
                "bytes_read_per_token": round(step.bytes_per_token),
                "multiply_adds_per_byte": step.intensity,
            }
            if hardware is not None:
                ranks = plan.request.ranks[0]
                seconds = step.seconds(hardware, ranks)
                by_memory = step.bytes_read / (hardware.bytes_per_s * ranks)
                row |= {
                    "bound_s_per_step": seconds,
                    "bound_tokens_per_s": batch / seconds,
                    "bound_by": "memory" if seconds <= by_memory else "arithmetic",
                }
            if plan.max_sequences is not None:
                row["fits"] = batch <= plan.max_sequences
            yield row

    def formats(self) -> Iterator[Row]:
        """The cache in other formats."""
        plan = self.plan
        for name in dict.fromkeys((plan.cache.kv_format, *FORMAT_CHOICES)):
            cache = replace(plan.cache, kv_format=name)
            yield self._beside({"kv_cache_dtype": name}, cache)

    def windows(self) -> Iterator[Row]:
        """If every layer saw a window only. Another model, that is: what it would answer, no arithmetic says."""
        for window, cache in self.with_windows():
            yield self._beside({"window": window}, cache)

    def with_windows(self) -> Iterator[tuple[int | None, CacheBytes]]:
        """The cache as it is, and with each window."""
        cache = self.plan.cache
        yield None, cache
        for window in WINDOWS:
            yield window, replace(cache, groups=tuple(_limited(group, window) for group in cache.groups))

    def heads(self) -> Iterator[Row]:
        """The same layers with other numbers of KV heads: MHA, GQA in eights, MQA."""
        plan = self.plan
        heads = plan.geometry.num_heads
        for kv_heads in sorted(
            {heads, 8, 1, *(g.num_kv_heads for g in plan.cache.groups if g.v_head_dim)}, reverse=True
        ):
            if kv_heads > heads or heads % kv_heads:
                continue
            name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
            groups = tuple(
                replace(group, num_kv_heads=kv_heads) if group.v_head_dim else group for group in plan.cache.groups
            )
            yield self._beside({"num_kv_heads": kv_heads, "attention": name}, replace(plan.cache, groups=groups))

    def _beside(self, row: Row, cache: CacheBytes) -> Row:
        plan = self.plan
        kv_bytes = cache.of(plan.context, plan.request.batch)
        budget = plan.kv_budget_bytes
        each = cache.of(plan.context)
        return {
            **row,
            "kv_bytes_per_token": plain(cache.bytes_per_token),
            "kv_bytes": kv_bytes,
            "relative": kv_bytes / plan.kv_bytes if plan.kv_bytes else None,
            "sequences": None if budget is None or not each else budget * plan.request.ranks[0] // each,
        }

    def tensor_parallel(self) -> Iterator[Row]:
        """What each rank holds; heads are kept by several ranks where there are more ranks than heads."""
        plan = self.plan
        of_heads = [group.num_kv_heads for group in plan.cache.groups if group.v_head_dim]
        for ranks in RANKS:
            cache = replace(plan.cache, groups=tuple(sharded(group, ranks) for group in plan.cache.groups))
            per_rank = cache.bytes_per_token
            whole = plan.cache.bytes_per_token
            yield {
                "ranks": ranks,
                "kv_heads_per_rank": max((-(-heads // ranks) for heads in of_heads), default=None),
                "copies_of_each_head": float(per_rank * ranks / whole) if whole else None,
                "kv_bytes_per_token": plain(per_rank),
                "kv_bytes": cache.of(plan.context, plan.request.batch),
                "weights_bytes": -(-plan.weights_bytes // ranks),
            }

    def pipeline_parallel(self) -> Iterator[Row]:
        """What the stage with most layers holds."""
        plan = self.plan
        for stages in (1, 2, 4, 8):
            if stages > plan.geometry.num_layers:
                return
            size = -(-plan.geometry.num_layers // stages)
            fullest = max(
                (
                    tuple(
                        replace(group, layer_indices=kept)
                        for group in plan.cache.groups
                        if (kept := tuple(layer for layer in group.layer_indices if start <= layer < start + size))
                    )
                    for start in range(0, plan.geometry.num_layers, size)
                ),
                key=lambda groups: replace(plan.cache, groups=groups).of(plan.context),
            )
            cache = replace(plan.cache, groups=fullest)
            yield {
                "stages": stages,
                "layers_per_stage": size,
                "kv_bytes_per_token": plain(cache.bytes_per_token),
                "kv_bytes": cache.of(plan.context, plan.request.batch),
                "weights_bytes": -(-plan.weights_bytes // stages),
            }

    def recompute(self) -> Iterator[Row]:
        """Multiply-adds of a prompt of the context and some new tokens, with the cache and without one."""
        plan, work = self.plan, self.plan.work
        if not work.per_row:
            return
        for output in OUTPUTS:
            cached, uncached = work.with_cache(plan.context, output), work.without_cache(plan.context, output)
            yield {
                "prompt_tokens": plan.context,
                "output_tokens": output,
                "multiply_adds_with_cache": cached,
                "multiply_adds_without_cache": uncached,
                "times": uncached / cached,
            }

    def contiguous(self) -> Row:
        """Room for the longest sequence for each, against blocks as they fill. Without a file: one of the context."""
        plan = self.plan
        lengths = self.lengths or Lengths((plan.context,))
        longest = max(plan.geometry.max_context if self.lengths is None else lengths.longest, lengths.longest)
        size = _BLOCK if plan.pool.block_size == 1 else plan.pool.block_size
        used = sum(plan.cache.of(length) for length in lengths.totals)
        reserved = plan.cache.of(longest) * lengths.count
        paged = sum(plan.cache.of(-(-length // size) * size) for length in lengths.totals)
        return {
            "sequences": lengths.count,
            "reserved_tokens_each": longest,
            "block_size": size,
            "used_bytes": used,
            "contiguous_bytes": reserved,
            "paged_bytes": paged,
            "contiguous_used_share": used / reserved if reserved else None,
            "paged_used_share": used / paged if paged else None,
        }

    def prefix_sharing(self) -> Row:
        """A prefix once for each user, and once for all."""
        shared, cache = self.shared, self.plan.cache
        each = cache.of(shared.prefix_tokens)
        return {
            "users": shared.users,
            "prefix_tokens": shared.prefix_tokens,
            "kv_bytes_each": each,
            "kv_bytes_without_sharing": each * shared.users,
            "kv_bytes_shared": each,
            "prefill_multiply_adds_without_sharing": self.plan.work.prefill(shared.prefix_tokens) * shared.users,
            "prefill_multiply_adds_shared": self.plan.work.prefill(shared.prefix_tokens),
        }

    def by_lengths(self, lengths: Lengths) -> Row:
        """How many sequences of such lengths fit on average, each at its full length."""
        plan = self.plan
        blocks = sum(plan.pool.blocks_for(length) for length in lengths.totals) / lengths.count
        return {
            "sequences": lengths.count,
            "mean_tokens": sum(lengths.totals) / lengths.count,
            "median_tokens": lengths.percentile(50),
            "p95_tokens": lengths.percentile(95),
            "longest_tokens": lengths.longest,
            "mean_blocks": blocks,
            "concurrent_sequences": None if plan.num_blocks is None else plan.num_blocks / blocks,
        }


def _limited(group: KVGroup, window: int) -> KVGroup:
    if group.kind == "state" or (group.window is not None and group.window <= window):
        return group
    return replace(group, window=window)
