"""How well a model predicts a text: the mean negative log-likelihood of its tokens, in nats. It does not know texts.

One sequence over a pool of its own, in chunks; every token is predicted from all that come before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_spec import KVSpec
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.ops import F32, AttentionBatch
from octavo.models.family import CausalLM

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 128


def nats_per_token(model: CausalLM, token_ids: Sequence[int], kv_format: str = "f32") -> float:
    """token_ids: at least two; the first is given, the others are predicted."""
    assert len(token_ids) >= 2
    spec = KVSpec(model.kv_groups(kv_format), _BLOCK_SIZE)
    num_groups, num_blocks = len(spec.groups), -(-len(token_ids) // _BLOCK_SIZE)
    storage = KVStorage(spec, num_groups * num_blocks)
    tables = np.arange(num_groups * num_blocks, dtype=np.int32).reshape(num_groups, 1, num_blocks)
    given, total = np.array(token_ids[:-1], np.int32), 0.0
    for start in range(0, len(given), _CHUNK_TOKENS):
        ids = given[start : start + _CHUNK_TOKENS]
        batch = AttentionBatch(np.array([0, len(ids)], np.int32), np.array([start], np.int32), tables)
        logits = model.forward(ids, batch, storage.layers, np.arange(len(ids), dtype=np.int32))
        total += _nats(logits, token_ids[start + 1 : start + 1 + len(ids)])
    return total / len(given)


def _nats(logits: F32, targets: Sequence[int]) -> float:
    """The sum over rows of -log softmax(logits)[target]."""
    wide = logits.astype(np.float64)
    most = wide.max(axis=1)
    logs = most + np.log(np.exp(wide - most[:, np.newaxis]).sum(axis=1))
    return float((logs - wide[np.arange(len(wide)), list(targets)]).sum())
