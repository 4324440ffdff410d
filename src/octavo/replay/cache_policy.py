"""One cache of one size under any eviction policy: the engine's block manager, one request after the other.

A block of the trace stands for one token of a block manager whose blocks hold one token, so that any trace fits. It
knows no time and no running requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core import events
from octavo.core.block_manager import BlockManager
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.replay.cache_blocks import block_size_of, named_blocks, number_of
from octavo.replay.policies import policy_named
from octavo.replay.trace import TraceRequest

_SPEC = KVSpec((KVGroupSpec("blocks", (0,), 1, 16, "bf16"),), 1)
_PARAMS = SamplingParams(max_tokens=1)
_LAST = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class PolicyReport:
    policy: str
    cache_blocks: int
    block_size: int
    requests: int
    tokens: int
    blocks: int
    hit_blocks: int
    hit_rate: float
    token_hit_rate: float
    evicted_blocks: int
    too_large: int  # requests with more blocks than the cache; they hit and leave nothing


def run_policy(requests: Iterable[TraceRequest], policy: str, num_blocks: int, block_size: int | None) -> PolicyReport:
    """Raises ConfigError for an unknown policy, or blocks that do not go with the block size."""
    idle, listener = policy_named(policy, num_blocks + 1)
    manager = BlockManager(_SPEC, num_blocks + 1, token_exact_hits=False, policy=idle)
    if listener is not None:
        manager.listeners.append(listener)
    count = tokens = blocks = hits = hit_tokens = too_large = size = 0
    for one in requests:
        size = block_size_of(one, block_size)
        named = named_blocks(one, size)
        count += 1
        tokens += one.num_prompt_tokens
        blocks += len(named.names)
        path = [*named.names, *named.produced]
        if not path or len(path) > num_blocks:
            too_large += len(path) > num_blocks
            continue
        ids = array(
            "I",
            [name if isinstance(name, int) and 0 <= name < _LAST else number_of(name) & 0x7FFFFFFF for name in path],
        )
        ids.append(_LAST)
        request = Request("r", ids, _PARAMS, seed=0, namespace=one.namespace)
        if listener is not None:
            listener(events.RequestAdded("r", one.namespace, len(path), one.priority))
        match = manager.find_prefix(request)
        manager.attach_prefix(request, match)
        found = min(len(match.nodes), len(named.names))
        hits += found
        hit_tokens += found * size - (size - named.last_tokens if found == len(named.names) else 0)
        grown = manager.grow(request, len(ids))
        assert grown is not None, "a request alone has room"
        request.num_computed_tokens = len(path)
        manager.commit(request)
        manager.release(request)
    rates = hits / blocks if blocks else 0.0, hit_tokens / tokens if tokens else 0.0
    evicted = manager.supply.num_evicted
    return PolicyReport(policy, num_blocks, size, count, tokens, blocks, hits, *rates, evicted, too_large)
