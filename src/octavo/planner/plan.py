"""The plan: from a geometry and what is asked to every figure, each with the formula that it came by.

One pure function; it prints nothing. Where octavo runs the model, bytes of blocks come from `core.kv_spec`, by which
the engine allocates (law 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from octavo.core.kv_bytes import FORMAT_BYTES, vector_bytes
from octavo.errors import ConfigError
from octavo.models.config import SUPPORTED_ARCHITECTURES
from octavo.models.packed_size import WEIGHTS_DTYPES, packed_bytes, resolve_weights_dtype
from octavo.planner.arithmetic import Step, Work, decode_step
from octavo.planner.cache_bytes import CacheBytes, read_format, sharded
from octavo.planner.families import family_named
from octavo.planner.geometry import Geometry, KVGroup
from octavo.planner.pools import BLOCK_SIZES, ENGINES, Pool, PoolOptions, llamacpp_bytes, make_pool, sglang_tokens
from octavo.planner.quantisation import STORAGE, weight_bytes
from octavo.replay.hardware import Hardware

# What an engine takes of a device's memory where nobody says it: vLLM's and SGLang's defaults; for a device of the
# catalogue 5% are left for activations and the driver, as in figure 1 of the PagedAttention paper (SOSP 2023).
DEFAULT_SHARES: Mapping[str, float] = {"vllm": 0.9, "sglang": 0.9}
DEVICE_SHARE = 0.95
DEFAULT_CONTEXT = 4096
STEP_TOKENS = 512  # octavo's --max-num-batched-tokens


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of a plan. Memory is that of one device; ranks and stages say over how many the model is spread."""

    engine: str = "octavo"
    context: int | None = None  # None: 4096, or the model's own where that is shorter
    batch: int = 1
    kv_cache_dtype: str = "auto"
    weights_dtype: str = "auto"
    block_size: int | None = None
    memory_bytes: int | None = None
    memory_share: float | None = None  # of memory_bytes that may be used
    overhead_bytes: int = 0  # activations, graphs, the driver
    kv_cache_memory: int | None = None  # bytes of the pool itself
    ranks: tuple[int, int] = (1, 1)  # tensor-parallel ranks, pipeline stages
    hardware: Hardware | None = None
    skip_layers: tuple[int, ...] = ()  # whose K and V stay as `auto` would have them

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine {self.engine!r} is not one of {', '.join(ENGINES)}")
        for name, value in (("context", self.context), ("batch", self.batch), ("block-size", self.block_size)):
            if value is not None and not 1 <= value <= 1 << 40:
                raise ConfigError(f"--{name} is {value}; it must be at least 1")
        for name, value in zip(("tensor-parallel-size", "pipeline-parallel-size"), self.ranks, strict=True):
            if not 1 <= value <= 4096:
                raise ConfigError(f"--{name} is {value}; it must be from 1 to 4096")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"--gpu-memory-utilization is {self.memory_share}; it must be above 0 and at most 1")
        if self.weights_dtype != "auto" and self.weights_dtype not in STORAGE:
            raise ConfigError(f"--weights-dtype {self.weights_dtype!r} is not one of auto, {', '.join(STORAGE)}")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ConfigError(f"--kv-cache-memory is {self.kv_cache_memory}; it must be at least 1 byte")


@dataclass(frozen=True, slots=True)
class Plan:
    """Every figure of a model as it was asked. Bytes of weights and cache are those of one rank."""

    geometry: Geometry
    request: PlanRequest
    context: int
    weights_dtype: str
    weights_bytes: int  # of the whole model
    rank_weights_bytes: int
    cache: CacheBytes  # of the whole model
    rank_cache: CacheBytes
    pool: Pool  # of one rank
    kv_budget_bytes: int | None
    is_exact: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def kv_bytes(self) -> int:
        return self.cache.of(self.context, self.request.batch)

    @property
    def crossover_tokens(self) -> int | None:
        """Tokens of each sequence of the batch from which on the cache outweighs the weights."""
        return self.cache.tokens_for(self.weights_bytes, self.request.batch) if self.weights_bytes else None

    @property
    def num_blocks(self) -> int | None:
        return None if self.kv_budget_bytes is None else self.pool.num_blocks(self.kv_budget_bytes)

    @property
    def max_tokens(self) -> int | None:
        """Tokens that fit, none shared; for octavo with windows, of one text."""
        if self.kv_budget_bytes is None or self.num_blocks is None:
            return None
        if self.request.engine == "sglang":
            return sglang_tokens(self.rank_cache.groups, self.pool.options, self.kv_budget_bytes)
        if self.request.engine == "llama.cpp":
            return self.context * self._contiguous_sequences(self.kv_budget_bytes)
        groups = self.rank_cache.groups
        if self.request.engine == "octavo" and any(part.group.window is not None for part in self.pool.parts):
            grows = any(group.window is None and group.kind != "state" for group in groups)
            limit = self.num_blocks * self.pool.block_size if grows else self.geometry.max_context
            return self.pool.longest_tokens(self.num_blocks, STEP_TOKENS, limit)
        return self.pool.tokens(self.num_blocks)

    @property
    def max_sequences(self) -> int | None:
        """Sequences of the context that fit side by side, none sharing anything."""
        if self.kv_budget_bytes is None or self.num_blocks is None:
            return None
        if self.request.engine == "sglang":
            return (self.max_tokens or 0) // self.context
        if self.request.engine == "llama.cpp":
            return self._contiguous_sequences(self.kv_budget_bytes)
        return math.floor(self.pool.sequences(self.num_blocks, self.context))

    def _contiguous_sequences(self, budget: int) -> int:
        low, high = 0, 1
        while (
            high < 1 << 40 and llamacpp_bytes(self.rank_cache.groups, self.pool.options, self.context, high) <= budget
        ):
            low, high = high, high * 2
        while low + 1 < high:
            middle = (low + high) // 2
            fits = llamacpp_bytes(self.rank_cache.groups, self.pool.options, self.context, middle) <= budget
            low, high = (middle, high) if fits else (low, middle)
        return low

    @property
    def step(self) -> Step:
        """One decode step of the batch at the context."""
        return self.step_of(self.request.batch)

    def step_of(self, batch: int) -> Step:
        return decode_step(self.geometry, self.cache, self.weights_bytes, batch, self.context)

    @property
    def work(self) -> Work:
        return Work(self.geometry)


def make_plan(geometry: Geometry, request: PlanRequest) -> Plan:
    """The plan. Raises ConfigError for what cannot be asked; that something does not fit is an answer, with a note."""
    runs = _runs(geometry)
    notes = list(geometry.notes)
    is_octavo = request.engine == "octavo"
    kv_format, dtype_notes = _kv_format(geometry, request, runs=runs)
    if request.skip_layers:
        own, _ = _kv_format(geometry, replace(request, kv_cache_dtype="auto"), runs=runs)
        geometry = replace(geometry, groups=_apart(geometry, request.skip_layers, own))
    weights_dtype, weights_bytes = _weights(geometry, request, runs=runs and is_octavo)
    context = request.context or min(DEFAULT_CONTEXT, geometry.max_context)
    if context > geometry.max_context:
        notes.append(f"the context {context} is longer than the model's own {geometry.max_context}")
    notes += dtype_notes
    is_plain = geometry.family == "numbers"  # of a cache whose model nobody named
    if is_octavo and not runs and not is_plain:
        notes.append(f"octavo does not run {geometry.architecture} yet: its block arithmetic is used all the same")
    if not is_octavo:
        notes.append(f"modelled: what {request.engine} does by default, from its logs and sources; octavo is exact")
    tensor, stages = request.ranks
    cache = CacheBytes(geometry.groups, kv_format, geometry.dtype)
    rank_groups = _stage(tuple(sharded(group, tensor) for group in geometry.groups), stages)
    options = PoolOptions(
        kv_format=kv_format,
        dtype=geometry.dtype,
        block_size=request.block_size or BLOCK_SIZES[request.engine],
        max_model_len=max(context, 1),
    )
    pool = make_pool(request.engine, rank_groups, options)
    rank_weights = -(-weights_bytes // (tensor * stages))
    plan = Plan(
        geometry=geometry,
        request=request,
        context=context,
        weights_dtype=weights_dtype,
        weights_bytes=weights_bytes,
        rank_weights_bytes=rank_weights,
        cache=cache,
        rank_cache=CacheBytes(rank_groups, kv_format, geometry.dtype),
        pool=pool,
        kv_budget_bytes=_budget(request, rank_weights),
        is_exact=is_octavo and (runs or is_plain) and geometry.exact,
        notes=tuple(notes),
    )
    return replace(plan, notes=(*plan.notes, *_tail_notes(pool), *_what_does_not_fit(plan)))


def _tail_notes(pool: Pool) -> list[str]:
    count = sum(part.count for part in pool.parts if part.group.kind == "tail")
    if not count:
        return []
    return [
        f"keys of the {pool.block_size} tokens that a sequence fills are kept apart, not yet quantised: {count} blocks "
        f"({count * pool.bytes_per_block} bytes) a sequence, and more of them while a step computes many tokens"
    ]


def _what_does_not_fit(plan: Plan) -> list[str]:
    """Sentences with the arithmetic, where no sequence of the context fits."""
    request = plan.request
    if plan.kv_budget_bytes == 0 and request.memory_bytes is not None:
        return [
            f"nothing fits: {request.memory_bytes} bytes x {memory_share(request):g}, less "
            f"{plan.rank_weights_bytes} of weights and {request.overhead_bytes} set aside, leaves no cache; give more "
            "memory, more ranks (--tensor-parallel-size) or smaller weights (--weights-dtype)"
        ]
    if plan.max_sequences == 0:
        return [
            f"no sequence of {plan.context} tokens fits: it needs "
            f"{plan.pool.blocks_for(plan.context) * plan.pool.bytes_per_block} bytes of cache and there are "
            f"{plan.kv_budget_bytes}; give more memory, a shorter --context or a smaller --kv-cache-dtype"
        ]
    return []


def _runs(geometry: Geometry) -> bool:
    """Whether the engine itself runs such a model."""
    running = {family_named(name) for name in SUPPORTED_ARCHITECTURES}
    return geometry.quantisation is None and family_named(geometry.family) in running


def _apart(geometry: Geometry, layers: tuple[int, ...], kv_format: str) -> tuple[KVGroup, ...]:
    """The groups, those of `layers` by themselves in a format of their own."""
    last = geometry.num_layers - 1
    if max(layers) > last:
        raise ConfigError(
            f"--kv-cache-dtype-skip-layers names layer {max(layers)}; this model's layers go from 0 to {last}"
        )
    found = []
    for group in geometry.groups:
        inside = tuple(layer for layer in group.layer_indices if layer in layers)
        outside = tuple(layer for layer in group.layer_indices if layer not in layers)
        if group.kind in ("state", "index") or not inside:
            found.append(group)
            continue
        if outside:
            found.append(replace(group, layer_indices=outside))
        found.append(replace(group, name=f"{group.name}-{kv_format}", layer_indices=inside, kv_format=kv_format))
    return tuple(sorted(found, key=lambda group: group.layer_indices))


def _stage(groups: tuple[KVGroup, ...], stages: int) -> tuple[KVGroup, ...]:
    """The groups of the stage that holds most: each stage has as many layers, one more where they do not divide."""
    if stages == 1:
        return groups
    num_layers = max(max(group.layer_indices) for group in groups) + 1
    size = -(-num_layers // stages)
    cut = [[layer for layer in group.layer_indices if layer < size] for group in groups]
    return tuple(
        replace(group, layer_indices=tuple(layers)) for group, layers in zip(groups, cut, strict=True) if layers
    )


def _kv_format(geometry: Geometry, request: PlanRequest, *, runs: bool) -> tuple[str, list[str]]:
    """The cache's format; `auto` is what the engine would take."""
    if request.kv_cache_dtype != "auto":
        asked = read_format(request.kv_cache_dtype)
        if request.engine == "octavo" and runs and asked in FORMAT_BYTES:
            for group in geometry.groups:
                if group.kind == "latent" and FORMAT_BYTES[asked].tail_format is not None:
                    vector_bytes(asked, group.head_dim, "latent")  # refuses
        if request.engine == "octavo" and runs and asked not in FORMAT_BYTES:
            offered = ", ".join(FORMAT_BYTES)
            return asked, [f"octavo offers {offered} as --kv-cache-dtype today; {asked} is counted, not offered"]
        return asked, []
    own = geometry.quantisation.kv_format if geometry.quantisation else None
    if own is not None and request.engine in ("vllm", "sglang"):
        return own, [f"the file's own scales ask for a cache in {own}"]
    if request.engine == "llama.cpp":
        return "f16", []
    stored = geometry.stored_dtype or geometry.dtype
    if request.engine == "octavo" and runs:
        return stored if stored in ("f32", "f16") else "bf16", []
    return geometry.dtype, []


def _weights(geometry: Geometry, request: PlanRequest, *, runs: bool) -> tuple[str, int]:
    """How weights are held, and their bytes. For a model that octavo runs, as its kernels pack them."""
    if runs:
        held = request.weights_dtype
        if held == "auto":
            held = resolve_weights_dtype("auto", geometry.stored_dtype or geometry.dtype)
        if held in WEIGHTS_DTYPES:
            return held, sum(
                each.count * packed_bytes(each.shape, held, each.stored, is_of_vocabulary=each.is_of_vocabulary)
                for each in geometry.tensors
            )
    if request.weights_dtype != "auto":
        return request.weights_dtype, weight_bytes(geometry, request.weights_dtype)
    name = geometry.quantisation.name if geometry.quantisation else geometry.dtype
    return ("as stored" if geometry.stored_bytes is not None else name), weight_bytes(geometry)


def _budget(request: PlanRequest, weights_bytes: int) -> int | None:
    """Bytes for the cache on one device; 0 where the weights leave none."""
    if request.kv_cache_memory is not None:
        return request.kv_cache_memory
    if request.memory_bytes is None:
        return None
    share = memory_share(request)
    usable = math.floor(Fraction(str(share)) * request.memory_bytes)
    left = usable - weights_bytes - request.overhead_bytes
    return max(0, left)


def memory_share(request: PlanRequest) -> float:
    """The part of the device's memory that is used."""
    if request.memory_share is not None:
        return request.memory_share
    if request.engine in DEFAULT_SHARES:
        return DEFAULT_SHARES[request.engine]
    return DEVICE_SHARE if request.hardware is not None else 1.0
