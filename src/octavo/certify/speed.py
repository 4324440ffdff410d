"""How fast a setting decodes here, on this machine as it is now. It does not know quality."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from octavo.certify.probe import Probe
from octavo.certify.setting import Setting
from octavo.core.config import SchedulerConfig
from octavo.kernels.ops import Ops
from octavo.models.family import CausalLM

NUM_TEXTS, NEW_TOKENS, MOST_TOKENS = 4, 24, 1024


def decode_tokens_per_s(
    model: CausalLM, ops: Ops, setting: Setting, token_ids: Sequence[int], clock: Callable[[], float]
) -> float:
    """Tokens a second of a few texts that decode together, by the median of their steps."""
    count = max(1, min(MOST_TOKENS, len(token_ids) // NUM_TEXTS, model.config.max_position_embeddings - NEW_TOKENS))
    config = SchedulerConfig(
        max_num_seqs=NUM_TEXTS,
        max_num_batched_tokens=512,
        max_model_len=count + NEW_TOKENS,
        enable_prefix_caching=False,
    )
    probe = Probe(model, ops, setting.spec, config, setting.scales)
    for index in range(NUM_TEXTS):
        start = index * count % max(1, len(token_ids) - count + 1)
        probe.add(f"text {index}", token_ids[start : start + count], None, NEW_TOKENS)
    times = []
    while probe.has_work:
        before, start_s = probe.core.status().generation_tokens, clock()
        probe.step()
        times.append((clock() - start_s, probe.core.status().generation_tokens - before))
    whole = [seconds for seconds, tokens in times if tokens == NUM_TEXTS]
    return NUM_TEXTS / max(statistics.median(whole), 1e-9)
