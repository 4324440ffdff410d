"""A plan as figures: each with its name, value, unit and the formula with the numbers put in.

JSON, CSV, tables and `--explain` are all made of these. It computes nothing that the plan does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from octavo.planner.cache_bytes import FORMATS, entry_bytes
from octavo.planner.geometry import KVGroup
from octavo.planner.plan import STEP_TOKENS, Plan, memory_share

Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: Value
    unit: str  # "bytes", "tokens", "bytes/token", ...; "" for words and counts
    formula: str  # with the numbers put in


def plain(value: Fraction | int) -> int | float:
    """A whole number as such, anything else as a float."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def figures_of(plan: Plan) -> list[Figure]:
    """All figures of a plan, in the order in which they are shown."""
    return [*_model(plan), *_cache(plan), *_memory(plan), *_speed(plan)]


def _model(plan: Plan) -> Iterator[Figure]:
    geometry = plan.geometry
    yield Figure("model", geometry.model, "", "the reference that was given")
    yield Figure("architecture", geometry.architecture, "", "by the file's own name of it")
    yield Figure("family", geometry.family, "", "how the planner reads it")
    yield Figure("attention", geometry.attention, "", _attention_formula(plan))
    tensors = ", ".join(
        f"{sum(each.parameters for each in geometry.tensors if each.role == role)} in {words}"
        for role, words in (("matrix", "matrices"), ("lookup", "tables"), ("vector", "vectors"))
    )
    yield Figure("parameters", geometry.parameters or None, "", f"sum over all tensors: {tensors}")
    yield Figure("active_parameters", geometry.active_parameters or None, "", "of experts only those a token takes")
    yield Figure("weights_dtype", plan.weights_dtype, "", "how matrices are held")
    each = plan.weights_bytes / max(1, geometry.parameters)
    yield Figure(
        "weights_bytes",
        plan.weights_bytes or None,
        "bytes",
        f"{geometry.parameters} parameters x {each:.4g} bytes on average = {plan.weights_bytes}",
    )


def _attention_formula(plan: Plan) -> str:
    return "; ".join(
        f"{group.name}: {group.num_layers} layers"
        + (f" x {group.num_kv_heads} KV heads x {group.head_dim}" if group.num_kv_heads else "")
        for group in plan.geometry.groups
    )


def group_formula(group: KVGroup, kv_format: str) -> str:
    """The byte formula of one group, with its numbers."""
    k, v = FORMATS[group.kv_format or kv_format]
    item = str(k) if k == v or not group.v_head_dim else f"(K {k}, V {v})"
    if group.kind == "index":
        return f"{group.num_layers} layers x {entry_bytes(group, kv_format)} bytes (index key in fp8 with scales)"
    if group.kind == "state":
        return (
            f"{group.num_layers} layers x ({group.state_numbers} state numbers in {group.state_dtype} + "
            f"{group.conv_numbers} convolution inputs) per sequence"
        )
    if not group.v_head_dim:
        text = f"{group.num_layers} layers x {group.head_dim} numbers (K and V in one) x {item}"
    elif group.v_head_dim == group.head_dim:
        text = f"2 (K and V) x {group.num_layers} layers x {group.num_kv_heads} KV heads x {group.head_dim} x {item}"
    else:
        sizes = f"({group.head_dim} + {group.v_head_dim})"
        text = f"{group.num_layers} layers x {group.num_kv_heads} KV heads x {sizes} x {item}"
    return text if group.tokens_per_entry == 1 else f"{text} / {group.tokens_per_entry} tokens an entry"


def _cache(plan: Plan) -> Iterator[Figure]:
    cache, request, pool = plan.cache, plan.request, plan.pool
    parts = " + ".join(group_formula(group, cache.kv_format) for group in cache.groups if group.kind != "state")
    per_token = plain(cache.bytes_per_token)
    yield Figure("kv_cache_dtype", cache.kv_format, "", "how K and V are stored")
    yield Figure("kv_bytes_per_token", per_token, "bytes/token", f"{parts or 'nothing per token'} = {per_token}")
    state = cache.bytes_per_sequence
    if state:
        states = " + ".join(
            group_formula(group, cache.kv_format) for group in cache.groups if cache.per_sequence(group)
        )
        yield Figure("kv_bytes_per_sequence", state, "bytes/sequence", f"{states} = {state}")
    yield Figure("block_size", pool.block_size, "tokens", "tokens of a block")
    yield Figure(
        "kv_bytes_per_block",
        pool.bytes_per_block,
        "bytes/block",
        "; ".join(
            f"{part.group.name}: {part.layers} layers x {part.block_tokens} tokens = {part.block_bytes} bytes"
            + (f", {part.count} block tables" if part.count > 1 else "")
            for part in pool.parts
        )
        + f"; every block has {pool.bytes_per_block}",
    )
    yield Figure("context", plan.context, "tokens", "tokens of one sequence")
    yield Figure("batch", request.batch, "sequences", "sequences side by side")
    each = " + ".join(f"{group.name} {cache.of_group(group, plan.context)}" for group in cache.groups)
    yield Figure("kv_bytes", plan.kv_bytes, "bytes", f"{request.batch} sequences x ({each}) = {plan.kv_bytes}")
    crossing = plan.crossover_tokens
    yield Figure(
        "crossover_tokens",
        crossing,
        "tokens",
        "weights are not known"
        if not plan.weights_bytes
        else f"the cache never reaches the weights ({plan.weights_bytes} bytes)"
        if crossing is None
        else f"least tokens of each of {request.batch} sequences with a cache of at least {plan.weights_bytes} bytes "
        f"({per_token} a token)",
    )


def _memory(plan: Plan) -> Iterator[Figure]:
    request, pool = plan.request, plan.pool
    yield Figure("engine", request.engine, "", "exact" if plan.is_exact else "modelled")
    yield Figure("memory_bytes", request.memory_bytes, "bytes", "of one device")
    budget = plan.kv_budget_bytes
    if request.kv_cache_memory is not None:
        formula = "as given by --kv-cache-memory"
    elif request.memory_bytes is not None:
        formula = (
            f"{request.memory_bytes} x {memory_share(request):g} - weights of a rank {plan.rank_weights_bytes} - set "
            f"aside {request.overhead_bytes} = {budget}"
        )
    else:
        formula = "no memory was given: --memory, --gpu or --kv-cache-memory"
    yield Figure("kv_memory_bytes", budget, "bytes", formula)
    if budget is None:
        for name, unit in (("num_blocks", "blocks"), ("max_tokens", "tokens"), ("max_sequences", "sequences")):
            yield Figure(name, None, unit, "no memory was given")
        return
    yield Figure("num_blocks", plan.num_blocks, "blocks", f"floor({budget} / {pool.bytes_per_block} bytes a block)")
    yield Figure("max_tokens", plan.max_tokens, "tokens", _tokens_formula(plan))
    needed = pool.blocks_for(plan.context)
    yield Figure(
        "max_sequences",
        plan.max_sequences,
        "sequences",
        f"floor({plan.num_blocks} blocks / {needed} blocks for {plan.context} tokens)",
    )


def _tokens_formula(plan: Plan) -> str:
    if len(plan.pool.parts) == 1 and plan.pool.num_tables == 1:
        return f"{plan.num_blocks} blocks x {plan.pool.block_size} tokens"
    if plan.request.engine == "octavo" and any(group.window is not None for group in plan.rank_cache.groups):
        return f"the longest text that {plan.num_blocks} blocks hold, each window in steps of {STEP_TOKENS} tokens"
    return f"{plan.num_blocks} blocks / {plan.pool.blocks_for(plan.context)} a sequence x {plan.context} tokens"


def _speed(plan: Plan) -> Iterator[Figure]:
    step = plan.step
    yield Figure(
        "bytes_read_per_token",
        round(step.bytes_per_token),
        "bytes",
        f"(weights {step.weights_bytes} + cache of the batch {step.kv_bytes}) / {step.batch} tokens",
    )
    yield Figure("kv_bytes_read_per_token", step.kv_bytes // step.batch, "bytes", "the whole cache of a sequence")
    yield Figure(
        "multiply_adds_per_token",
        step.multiply_adds // step.batch,
        "multiply-adds",
        f"matrices {plan.work.per_row} + head {plan.work.head} + attention over {plan.context} keys "
        f"{plan.work.attention_row(plan.context)}",
    )
    hardware = plan.request.hardware
    if hardware is None:
        return
    ranks = plan.request.ranks[0]
    seconds = step.seconds(hardware, ranks)
    yield Figure(
        "bound_s_per_step",
        seconds,
        "s",
        f"max({step.bytes_read} bytes / {ranks} x {hardware.bytes_per_s:.4g} bytes/s, 2 x {step.multiply_adds} / "
        f"{ranks} x {hardware.flops_per_s:.4g} a second); peaks: {hardware.source}",
    )
    yield Figure("bound_tokens_per_s", step.batch / seconds, "tokens/s", f"{step.batch} tokens / {seconds:.4g} s")
