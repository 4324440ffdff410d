"""A short measure for `octavo compress`: how far each KV format is from f32, on a text. It gives no advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError, ModelError
from octavo.executor.config import resolve_weights_dtype
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch
from octavo.models.family import CausalLM
from octavo.models.loader import ModelSource, load_model, open_model
from octavo.planner.compression_quality import DEFAULT_MAX_KL, DEFAULT_MIN_TOP1, Measured

_BLOCK, _CHUNK = 16, 128
_SMALL_BYTES = 512 << 20
REFERENCE = "f32"


def measure_formats(path: Path, text: str, num_tokens: int) -> tuple[tuple[Measured, ...], list[str]]:
    """Each format on the first tokens of a text as one request, against an f32 cache; and why the others were not.

    Raises ModelError for a model that cannot run here, ConfigError for a text without two tokens.
    """
    source = open_model(path)
    limit = min(num_tokens, source.config.max_position_embeddings)
    token_ids = tokens_of(source, text)[:limit]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; give one of at least 2 with --text")
    weights_dtype = resolve_weights_dtype("auto", source.config.dtype)
    if path_bytes(path) <= _SMALL_BYTES:  # int8 rounds activations, which hides what little the cache does
        weights_dtype = "f32"
    model = load_model(source, NativeOps(), weights_dtype)
    expected = _log_probabilities(model, token_ids, REFERENCE)
    found, notes = [], []
    for name in FORMAT_BYTES:
        if name == REFERENCE:
            continue
        try:
            found.append(_distance(name, _log_probabilities(model, token_ids, name), expected))
        except (ConfigError, ModelError) as error:
            notes.append(f"{name} was not measured: {error}")
    about = f"{len(token_ids)} tokens as one request, weights in {weights_dtype}; fp8 with scales of 1"
    notes.append(
        f"measured on {about}; limits: KL {DEFAULT_MAX_KL}, top-1 {DEFAULT_MIN_TOP1} within two standard errors"
    )
    return tuple(found), notes


def path_bytes(path: Path) -> int:
    """Of the weights, as they are stored."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def tokens_of(source: ModelSource, text: str) -> list[int]:
    from octavo.cli.convert import tokenizer_of_source

    return tokenizer_of_source(source).encode(text)


def _log_probabilities(model: CausalLM, token_ids: Sequence[int], kv_format: str) -> F32:
    """[tokens, vocab_size]"""
    spec = KVSpec(model.kv_groups(kv_format), _BLOCK)
    num_groups, num_blocks = len(spec.groups), -(-len(token_ids) // _BLOCK)
    storage = KVStorage(spec, num_groups * num_blocks)
    tables = np.arange(num_groups * num_blocks, dtype=np.int32).reshape(num_groups, 1, num_blocks)
    found = []
    for start in range(0, len(token_ids), _CHUNK):
        ids = np.array(token_ids[start : start + _CHUNK], np.int32)
        batch = AttentionBatch(np.array([0, len(ids)], np.int32), np.array([start], np.int32), tables)
        logits = model.forward(ids, batch, storage.layers, np.arange(len(ids), dtype=np.int32))
        logits = logits - logits.max(axis=1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.concatenate(found)


def _distance(name: str, found: F32, expected: F32) -> Measured:
    divergence = np.maximum(0.0, (np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64))  # rounding
    same = float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())
    mean, error = float(divergence.mean()), (same * (1 - same) / len(found)) ** 0.5
    return Measured(
        name,
        kl_mean=mean,
        kl_p99=float(np.quantile(divergence, 0.99)),
        top1=same,
        source="measured now",
        is_good=mean <= DEFAULT_MAX_KL and same + 2 * error >= DEFAULT_MIN_TOP1,
    )
