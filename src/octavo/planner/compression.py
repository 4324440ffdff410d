"""What makes a cache smaller, side by side: fewer heads, fewer bits, fewer tokens, and all of them together.

Every byte comes from the plan. It knows no quality and recommends nothing: see `compression_quality` and
`compression_advice`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.core.config import SchedulerConfig
from octavo.core.kv_bytes import FORMAT_BYTES, vector_bytes
from octavo.errors import ConfigError
from octavo.planner.geometry import Geometry, KVGroup
from octavo.planner.plan import Plan, PlanRequest, make_plan

ALL_TOKENS, AS_TRAINED = "all", "as trained"
_SHARES = (4, 16)  # a policy keeps one token of so many
_SINKS = 4
_LEAST_KEPT = 256
# DeepSeek-V2 (arXiv:2405.04434), table 1: a latent of 4 and a rope key of 1/2 times the numbers of a head.
_MLA_RANK, _MLA_ROPE = 4, 2


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads K and V have."""

    name: str
    num_kv_heads: int  # 0: a latent instead
    needs: str  # what has to be done first; "": nothing


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many tokens of a request are kept."""

    name: str
    kept: int
    peak: int  # while its prompt is computed
    policy: str | None = None  # a text for --kv-policy
    window: int | None = None  # of every layer: another model
    needs: str = ""
    is_offered: bool = True  # by this engine


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a request of the context."""

    heads: Heads
    kv_format: str
    tokens: Tokens
    kv_bytes: int  # of one request, in whole blocks, once its prompt is computed
    peak_kv_bytes: int  # while it is
    requests: int  # side by side

    @property
    def needs(self) -> str:
        return "; ".join(filter(None, (self.heads.needs, self.tokens.needs)))

    def ways(self, kv_format: str) -> tuple[str, ...]:
        """Which of the three it takes, beside a cache in `kv_format` of the model as it is."""
        taken = {
            "heads": self.heads.name != AS_TRAINED,
            "bits": self.kv_format != kv_format,
            "tokens": self.tokens.name != ALL_TOKENS,
        }
        return tuple(name for name, is_taken in taken.items() if is_taken)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model at a context in a memory. `options` begin with the model as it is."""

    plan: Plan
    options: tuple[Option, ...]
    skipped: tuple[tuple[str, str], ...]  # format, why this model cannot have it

    @property
    def baseline(self) -> Option:
        return self.options[0]

    def having(self, *ways: str) -> list[Option]:
        """Those that take exactly these ways."""
        own = self.baseline.kv_format
        return [one for one in self.options[1:] if one.ways(own) == ways]


def compare(geometry: Geometry, request: PlanRequest) -> Comparison:
    """Raises ConfigError, with the arithmetic, where not even the smallest of all fits once."""
    plan = make_plan(geometry, request)
    budget = plan.kv_budget_bytes
    if budget is None:
        raise ConfigError("nothing says how much memory there is; give --memory, --hardware or --kv-cache-memory")
    if not budget:
        raise ConfigError(
            f"the weights have {plan.rank_weights_bytes} bytes ({plan.weights_dtype}), which leaves nothing of "
            f"{request.memory_bytes} bytes of memory for a cache; give more memory or smaller weights (--weights-dtype)"
        )
    formats, skipped = _formats(plan)
    pools, options = _Pools(geometry, replace(request, kv_cache_memory=budget)), []
    for heads, groups in _heads(geometry):
        for kv_format in formats:
            if kv_format != plan.cache.kv_format and _why_not(groups, kv_format):
                continue  # the heads that it is combined with cannot have it
            for tokens in _tokens(plan, groups, kv_format):
                options.append(pools.option(heads, groups, kv_format, tokens))
    own = plan.cache.kv_format
    options.sort(key=lambda one: bool(one.ways(own)))  # the model as it is first, the others as they were
    smallest = min(options, key=lambda one: one.peak_kv_bytes)
    if not any(one.requests for one in options):
        raise ConfigError(
            f"no way to keep {plan.context} tokens fits: the smallest ({words_of(smallest)}) has "
            f"{smallest.peak_kv_bytes} bytes, and there are {budget} for the cache (weights have "
            f"{plan.rank_weights_bytes}); give more memory or a shorter --context"
        )
    return Comparison(plan, tuple(options), tuple(skipped))


def words_of(option: Option) -> str:
    return f"heads {option.heads.name}, {option.kv_format}, tokens {option.tokens.name}"


class _Pools:
    """Pools of the model with other groups and formats; each is planned once."""

    def __init__(self, geometry: Geometry, request: PlanRequest) -> None:
        self._geometry = geometry
        self._request = request
        self._plans: dict[tuple[str, str, int | None], Plan] = {}

    def option(self, heads: Heads, groups: tuple[KVGroup, ...], kv_format: str, tokens: Tokens) -> Option:
        key = (heads.name, kv_format, tokens.window)
        if key not in self._plans:
            if tokens.window is not None:
                groups = tuple(_limited(group, tokens.window) for group in groups)
            request = replace(self._request, kv_cache_dtype=kv_format)
            self._plans[key] = make_plan(replace(self._geometry, groups=groups), request)
        plan = self._plans[key]
        pool, num_blocks = plan.pool, plan.num_blocks or 0
        kept, peak = pool.blocks_for(tokens.kept), pool.blocks_for(tokens.peak)
        requests = 0 if num_blocks < peak else 1 + (num_blocks - peak) // kept
        size = pool.bytes_per_block
        return Option(heads, kv_format, tokens, kept * size, peak * size, requests)


def _limited(group: KVGroup, window: int) -> KVGroup:
    return (
        group if group.window is not None and group.window <= window else replace(group, window=window, kind="window")
    )


def _formats(plan: Plan) -> tuple[list[str], list[tuple[str, str]]]:
    """The cache's own format first, then every other that the model can have, and why not the rest."""
    found, skipped = [plan.cache.kv_format], []
    for name in FORMAT_BYTES:
        if name == plan.cache.kv_format:
            continue
        reason = _why_not(plan.cache.groups, name)
        if reason:
            skipped.append((name, reason))
        else:
            found.append(name)
    return found, skipped


def _why_not(groups: tuple[KVGroup, ...], kv_format: str) -> str:
    """Why they cannot have a format of the engine's; nothing where they can."""
    try:
        for group in groups:
            if group.head_dim and kv_format in FORMAT_BYTES:
                vector_bytes(kv_format, group.head_dim, "pair" if group.v_head_dim else "latent")
    except ConfigError as error:
        return str(error)
    return ""


def _heads(geometry: Geometry) -> Iterator[tuple[Heads, tuple[KVGroup, ...]]]:
    """The model's own, then fewer KV heads as `octavo convert` makes them, then a latent in their place."""
    pairs = [group for group in geometry.groups if group.v_head_dim]
    now = max((group.num_kv_heads for group in pairs), default=0)
    yield Heads(AS_TRAINED, now, ""), geometry.groups
    if not now:
        return
    for count in sorted(
        {count for count in (now // 2, now // 4, 1) if 1 <= count < now and not now % count}, reverse=True
    ):
        name = "MQA" if count == 1 else f"GQA-{count}"
        fewer = tuple(
            replace(group, num_kv_heads=min(count, group.num_kv_heads)) if group.v_head_dim else group
            for group in geometry.groups
        )
        yield Heads(name, count, f"octavo convert --kv-heads {count}, then training"), fewer
    dim = max(group.head_dim for group in pairs)
    latent = _MLA_RANK * dim + dim // _MLA_ROPE
    if latent < now * 2 * dim and geometry.groups == tuple(pairs):
        groups = tuple(
            replace(
                group,
                kind="latent" if group.window is None else group.kind,
                num_kv_heads=1,
                head_dim=latent,
                v_head_dim=0,
            )
            for group in geometry.groups
        )
        yield Heads("MLA", 0, "a model trained with latents"), groups


def _tokens(plan: Plan, groups: tuple[KVGroup, ...], kv_format: str) -> Iterator[Tokens]:
    """All of them; and where the engine could drop some, policies and windows that keep a fourth and a sixteenth."""
    context = plan.context
    yield Tokens(ALL_TOKENS, context, context)
    is_plain = all(group.kind == "full" and group.v_head_dim and not group.index_dim for group in groups)
    if not is_plain:
        return
    size = plan.pool.block_size
    for share in _SHARES:
        kept = max(_LEAST_KEPT, context // share) // size * size
        if kept < 4 * size or kept >= context:
            continue
        yield Tokens(f"window {kept}", kept, kept, window=kept, needs="a model trained with windows")
        if getattr(FORMAT_BYTES.get(kv_format), "tail_format", None) is not None:
            continue  # keys are quantised by whole tiles: none may be taken out
        for policy, peak in _policies(kept, size, context):
            name = policy.partition(":")[0]
            offered = is_offered(policy)
            needs = "" if offered else f"an engine with the policy {name}"
            yield Tokens(policy, kept, peak, policy, needs=needs, is_offered=offered)


def _policies(kept: int, size: int, context: int) -> Iterator[tuple[str, int]]:
    """Policies that hold at most `kept` tokens, a multiple of the block size, and what they hold of a prompt."""
    piece = max(size, kept // 8 // size * size)
    sinks = -(-_SINKS // size) * size
    yield f"streaming:{_SINKS},{kept - sinks - piece},{piece}", kept
    budget = kept - piece
    yield f"h2o:{budget},{max(size, budget // 2 // size * size)},{piece}", kept
    yield f"snapkv:{kept},{min(64, kept // 4)},5", context  # the choice is made when the prompt has been computed


def is_offered(policy: str) -> bool:
    """Whether this engine has the policy."""
    try:
        SchedulerConfig(kv_policy=policy)
    except ConfigError:
        return False
    return True
