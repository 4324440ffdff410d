"""How long a step takes on a machine: a roofline over what the step computes and reads. Pure arithmetic, no clock.

Matrices cost the greater of reading them once and multiplying all rows by them (Williams, Waterman, Patterson:
"Roofline", CACM 52, 2009); attention costs reading the K and V of every row's past, and computing with them, of which
one is small beside the other; layers and steps have fixed costs. Several devices split all of it evenly, and what they
have to tell each other is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.replay.hardware import Hardware
from octavo.replay.model_shape import ModelShape

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, added up over its rows."""

    num_tokens: int = 0
    num_sampled: int = 0
    read_tokens: int = 0  # tokens whose K and V are read: once by each row, its own new ones included
    score_pairs: int = 0  # pairs of a query and a key


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: fixed + matrices + head + attention. Made by `roofline`, or fitted (`cost_fit`)."""

    name: str
    weights_s: float  # reading the matrices of all layers once
    token_s: float  # multiplying one row by them
    head_weights_s: float
    head_token_s: float
    read_token_s: float  # reading K and V of one token in all layers
    pair_s: float  # one query against one key, in all layers
    fixed_s: float

    def step_s(self, work: StepWork) -> float:
        if not work.num_tokens:
            return 0.0
        linear = max(self.weights_s, self.token_s * work.num_tokens)
        head = max(self.head_weights_s, self.head_token_s * work.num_sampled) if work.num_sampled else 0.0
        attention = self.read_token_s * work.read_tokens + self.pair_s * work.score_pairs
        return self.fixed_s + linear + head + attention

    def prefill_s(self, num_tokens: int, start: int = 0, chunk: int = 2048) -> float:
        """One prompt alone, in chunks."""
        total = 0.0
        for first in range(start, num_tokens, chunk):
            end = min(first + chunk, num_tokens)
            total += self.step_s(work_of([(first, end - first, end == num_tokens)]))
        return total

    @property
    def prefill_token_s(self) -> float:
        """One prompt token in a full step, attention left out: what a token that is found saves at least."""
        return self.token_s


def roofline(model: ModelShape, hardware: Hardware, kv_bytes_per_token: int, num_devices: int = 1) -> CostModel:
    """The cost of a model in bf16 on `num_devices` devices alike."""
    bandwidth = hardware.bytes_per_s * hardware.bandwidth_efficiency * num_devices
    flops = hardware.flops_per_s * hardware.compute_efficiency * num_devices
    attention = hardware.bytes_per_s * hardware.attention_efficiency * num_devices
    pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
    several = f" x {num_devices}" if num_devices > 1 else ""
    return CostModel(
        name=f"roofline of {model.name} on {hardware.name}{several}",
        weights_s=model.layer_parameters * BF16_BYTES / bandwidth,
        token_s=2 * model.layer_parameters / flops,
        head_weights_s=model.head_parameters * BF16_BYTES / bandwidth,
        head_token_s=2 * model.head_parameters / flops,
        read_token_s=kv_bytes_per_token / attention,
        pair_s=pair_flops / (flops * 0.5),  # attention kernels reach about half of what matrices do
        fixed_s=hardware.step_overhead_s + model.num_layers * hardware.layer_overhead_s,
    )


def work_of(rows: Iterable[tuple[int, int, bool]]) -> StepWork:
    """rows: (tokens before, tokens in this step, whether a token is sampled)."""
    tokens = sampled = read = pairs = 0
    for start, count, is_sampled in rows:
        tokens += count
        sampled += is_sampled
        read += start + count
        pairs += count * start + count * (count + 1) // 2
    return StepWork(tokens, sampled, read, pairs)
