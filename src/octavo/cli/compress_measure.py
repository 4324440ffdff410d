"""Short measures for `octavo compress` on a text: how far each KV format is from f32, and what fewer heads and fewer
tokens cost in likelihood. It gives no advice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError, OctavoError
from octavo.executor.config import SCALABLE_FORMATS, ExecutorConfig
from octavo.executor.kv_setting import UNCALIBRATED
from octavo.executor.kv_storage import KVStorage
from octavo.executor.likelihood import nats_per_token
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch
from octavo.models.family import CausalLM
from octavo.models.loader import ModelSource, load_model, open_model
from octavo.models.packed_size import resolve_weights_dtype
from octavo.planner.compression import ALL_TOKENS, AS_TRAINED, Comparison
from octavo.planner.compression_quality import DEFAULT_MAX_KL, DEFAULT_MIN_TOP1, Likelihood, Measured

if TYPE_CHECKING:
    from octavo.llm import LLM

_BLOCK, _CHUNK = 16, 128
_SMALL_BYTES = 512 << 20
_WITH_POLICIES = "int8"  # the format that policies are measured with, beside the model's own
REFERENCE = "f32"


@dataclass(slots=True)
class Measures:
    """What was found, and what was not and why."""

    formats: tuple[Measured, ...] = ()
    likelihoods: list[Likelihood] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(path: Path, comparison: Comparison, text: str, num_tokens: int) -> Measures:
    """On the first tokens of a text, as one request. Raises ModelError for a model that cannot run here, ConfigError
    for a text without two tokens.
    """
    source = open_model(path)
    limit = min(num_tokens, source.config.max_position_embeddings - 1)
    token_ids = tokens_of(source, text)[:limit]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; give one of at least 2 with --text")
    is_small = path_bytes(path) <= _SMALL_BYTES
    weights_dtype = resolve_weights_dtype("auto", source.config.dtype)
    if is_small:  # int8 rounds activations, which hides what little the cache does
        weights_dtype = "f32"
    found = Measures()
    model = load_model(source, NativeOps(), weights_dtype)
    expected = _log_probabilities(model, token_ids, REFERENCE)
    found.formats = tuple(_formats(model, token_ids, expected, found.notes))
    about = f"{len(token_ids)} tokens as one request, weights in {weights_dtype}; fp8 with scales of 1"
    found.notes.append(
        f"measured on {about}; limits: KL {DEFAULT_MAX_KL}, top-1 {DEFAULT_MIN_TOP1} within two standard errors"
    )
    del model
    before = -float(expected[np.arange(len(token_ids) - 1), token_ids[1:]].mean(dtype=np.float64))
    if is_small:
        found.likelihoods += _fewer_heads(source, comparison, token_ids, before)
    found.likelihoods += _fewer_tokens(path, comparison, token_ids, found.notes)
    return found


def path_bytes(path: Path) -> int:
    """Of the weights, as they are stored."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def tokens_of(source: ModelSource, text: str) -> list[int]:
    from octavo.engine.tokenizer import Tokenizer

    return Tokenizer.from_source(source.tokenizer_source).encode(text)


def _formats(model: CausalLM, token_ids: Sequence[int], expected: F32, notes: list[str]) -> Iterator[Measured]:
    for name in FORMAT_BYTES:
        if name == REFERENCE:
            continue
        try:
            yield _distance(name, _log_probabilities(model, token_ids, name), expected)
        except OctavoError as error:
            notes.append(f"{name} was not measured: {error}")


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


def _fewer_heads(
    source: ModelSource, comparison: Comparison, token_ids: Sequence[int], before: float
) -> Iterator[Likelihood]:
    """What `octavo convert` makes of the model, which nobody has trained since."""
    from octavo.models.convert import check_kv_heads, pool_kv_heads

    own = comparison.baseline.kv_format
    for option in comparison.having("heads"):
        count = option.heads.num_kv_heads
        try:
            check_kv_heads(source, count)
        except OctavoError:  # another family, or a latent
            continue
        with tempfile.TemporaryDirectory() as folder:
            pool_kv_heads(source, count, Path(folder))
            nats = nats_per_token(load_model(open_model(Path(folder)), NativeOps(), "f32"), token_ids)
        yield Likelihood(option.heads.name, own, ALL_TOKENS, len(token_ids) - 1, nats, before)


def _fewer_tokens(
    path: Path, comparison: Comparison, token_ids: Sequence[int], notes: list[str]
) -> Iterator[Likelihood]:
    """By the engine itself. SnapKV drops when a prompt is over, so that a prompt's likelihood does not see it."""
    from octavo.llm import LLM

    policies = [
        option.tokens
        for option in comparison.having("tokens")
        if option.tokens.policy and option.tokens.is_offered and not option.tokens.policy.startswith("snapkv")
    ]
    dropping = [one.name for one in policies if one.kept < len(token_ids)]
    if not dropping:
        if policies:
            least = min(one.kept for one in policies)
            notes.append(
                f"policies keep {least} tokens and more: give a longer --text and --text-tokens to measure them"
            )
        return
    cache = comparison.plan.cache
    memory = max(64 << 20, 4 * cache.of(len(token_ids)))
    for kv_format in dict.fromkeys((cache.kv_format, _WITH_POLICIES)):
        options = ExecutorConfig(
            kv_cache_dtype=kv_format,
            kv_cache_scales=UNCALIBRATED if kv_format in SCALABLE_FORMATS else None,  # as the formats above
            kv_cache_memory=memory,
        )
        before = 0.0
        try:
            with LLM(str(path), max_model_len=len(token_ids) + 1, **asdict(options)) as llm:
                for name in (ALL_TOKENS, *dropping):
                    nats = _nats_of(llm, token_ids, name)
                    mean = sum(nats) / len(nats)
                    before = before or mean
                    yield Likelihood(AS_TRAINED, kv_format, name, len(nats), mean, before)
        except OctavoError as error:
            notes.append(f"policies were not measured in {kv_format}: {error}")


def _nats_of(llm: LLM, token_ids: Sequence[int], policy: str) -> list[float]:
    from octavo.core.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, kv_policy=policy)
    (answer,) = llm.generate(list(token_ids), params)
    scores = answer.prompt_logprobs or ()
    return [-one.logprob for one in scores if one is not None and one.logprob is not None]
