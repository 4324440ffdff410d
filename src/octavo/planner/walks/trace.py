"""A run of the engine's own core that is watched: which blocks each request holds, what it hit, what it computed.

The core is the live engine's, or one with an executor that computes nothing (`StandIn`): it decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core import events
from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampledToken, StepPlan, StepResult

BLOCK_SIZE, NUM_BLOCKS, VOCAB = 16, 512, 50_000


class StandIn:
    """Draws tokens that depend on the request's seed and the position alone, and computes nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = {}
        for row in plan.rows:
            if row.sample is not None:
                sampled[row.request_id] = SampledToken(_token(row.sample.seed, row.sample.position))
            for branch in row.branch_samples:
                sampled[branch.request_id] = SampledToken(_token(branch.sample.seed, branch.sample.position))
        return StepResult(sampled=sampled, num_tokens=plan.num_tokens)


def _token(seed: int, position: int) -> int:
    return (seed * 2654435761 + position * 40503 + 977) % VOCAB


def stand_in_core(num_layers: int = 2, num_blocks: int = NUM_BLOCKS) -> EngineCore:
    """The engine's core around an executor that computes nothing."""
    group = KVGroupSpec("full", tuple(range(num_layers)), 1, 16, next(iter(FORMAT_BYTES)))
    blocks = BlockManager(KVSpec((group,), BLOCK_SIZE), num_blocks)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=BLOCK_SIZE * num_blocks)
    return EngineCore(Scheduler(config, blocks, vocab_size=VOCAB), StandIn())


@dataclass(slots=True)
class Seen:
    """One request, as the core told of it."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    output: list[int] = field(default_factory=list)
    num_attached: int = 0  # blocks that were there already
    table: tuple[int, ...] = ()  # of the first KV group, as it was at the end
    copied: list[tuple[int, int, int]] = field(default_factory=list)  # source, target, tokens

    @property
    def computed_tokens(self) -> int:
        """Of prompt and output, less what was hit; the last token drawn is never computed."""
        return self.prompt_tokens + len(self.output) - 1 - self.hit_tokens


class Watcher:
    """Listens to a core and keeps what it says, by request."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.requests: dict[str, Seen] = {}
        core.add_listener(self._hear)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, name: str, seed: int = 1) -> list[Seen]:
        """Run these prompts side by side to their ends."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        started = []
        for index, prompt in enumerate(prompts):
            request = Request(f"{name}-{index}", list(prompt), params, seed=seed + index)
            self.requests[request.request_id] = Seen(prompt_tokens=len(prompt))
            self._core.add(request)
            started.append(request.request_id)
        while self._core.has_work:
            for output in self._core.step():
                if output.token is not None:
                    self.requests[output.request_id].output.append(output.token.token_id)
        return [self.requests[each] for each in started]

    def _hear(self, event: object) -> None:
        if isinstance(event, events.RequestAdmitted) and event.request_id in self.requests:
            self.requests[event.request_id].hit_tokens += event.num_hit_tokens
        elif isinstance(event, events.PrefixAttached) and event.request_id in self.requests:
            self.requests[event.request_id].num_attached = len(event.block_tables[0])
        elif isinstance(event, events.BlocksReleased) and event.request_id in self.requests:
            self.requests[event.request_id].table = tuple(event.block_tables[0])
        elif isinstance(event, events.BlocksCopied) and event.request_id in self.requests:
            copy = (event.sources[0], event.targets[0], event.num_tokens)
            self.requests[event.request_id].copied.append(copy)
