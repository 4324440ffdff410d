"""How well a model predicts a text: the mean negative log-likelihood of its tokens, in nats. It does not know texts.

One sequence over a pool of its own, in chunks; every token is predicted from all that come before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.executor.one_text import OneText
from octavo.kernels.ops import F32
from octavo.models.family import CausalLM


def nats_per_token(model: CausalLM, token_ids: Sequence[int], kv_format: str = "f32") -> float:
    """token_ids: at least two; the first is given, the others are predicted."""
    assert len(token_ids) >= 2
    text = OneText(model, model.kv_groups(kv_format), len(token_ids) - 1)
    total = 0.0
    for first, logits in text.chunks(token_ids[:-1]):
        total += _nats(logits, token_ids[first + 1 : first + 1 + len(logits)])
    return total / (len(token_ids) - 1)


def _nats(logits: F32, targets: Sequence[int]) -> float:
    """The sum over rows of -log softmax(logits)[target]."""
    wide = logits.astype(np.float64)
    most = wide.max(axis=1)
    logs = most + np.log(np.exp(wide - most[:, np.newaxis]).sum(axis=1))
    return float((logs - wide[np.arange(len(wide)), list(targets)]).sum())
