"""Short measures for `octavo compress` on a text: how far each KV format is from f32, and what fewer heads and fewer
tokens cost in likelihood. It gives no advice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.certify.divergence import Distance, Expected, Tally
from octavo.certify.limits import Limits
from octavo.certify.setting import REFERENCE
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError, OctavoError
from octavo.executor.config import SCALABLE_FORMATS, ExecutorConfig
from octavo.executor.kv_setting import UNCALIBRATED
from octavo.executor.likelihood import nats_per_token
from octavo.executor.one_text import OneText
from octavo.kernels.native import NativeOps
from octavo.models.family import CausalLM
from octavo.models.loader import ModelSource, load_model, open_model
from octavo.models.packed_size import resolve_weights_dtype
from octavo.planner.compression import ALL_TOKENS, AS_TRAINED, Comparison
from octavo.planner.compression_quality import Likelihood, Measured

if TYPE_CHECKING:
    from octavo.llm import LLM

PIECE_TOKENS = 2048  # of one request: what is in memory does not grow with the text
_SMALL_BYTES = 512 << 20
_LIMITS = Limits()  # those of `octavo certify`, where nobody asks for others
_WITH_POLICIES = "int8"  # the format that policies are measured with, beside the model's own


@dataclass(slots=True)
class Measures:
    """What was found, and what was not and why."""

    formats: tuple[Measured, ...] = ()
    likelihoods: list[Likelihood] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure(path: Path, comparison: Comparison, text: str, num_tokens: int) -> Measures:
    """On the first tokens of a text. Raises ModelError for a model that cannot run here, ConfigError for a text without
    two tokens.
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
    found.formats = tuple(measure_formats(model, token_ids, found.notes))
    how = "as one request" if len(token_ids) <= PIECE_TOKENS else f"in requests of {PIECE_TOKENS}"
    found.notes.append(
        f"measured on {len(token_ids)} tokens {how}, weights in {weights_dtype}; fp8 with scales of 1; "
        f"limits: KL {_LIMITS.max_kl}, top-1 {_LIMITS.min_top1} within two standard errors"
    )
    if is_small:
        before = nats_per_token(model, token_ids)
        found.likelihoods += _fewer_heads(source, comparison, token_ids, before)
    del model
    found.likelihoods += _fewer_tokens(path, comparison, token_ids, found.notes)
    return found


def path_bytes(path: Path) -> int:
    """Of the weights, as they are stored."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def tokens_of(source: ModelSource, text: str) -> list[int]:
    from octavo.engine.tokenizer import Tokenizer

    return Tokenizer.from_source(source.tokenizer_source).encode(text)


def measure_formats(model: CausalLM, token_ids: Sequence[int], notes: list[str]) -> Iterator[Measured]:
    """Each format beside the reference, on the same chunk: no more logits are there than those of two of them."""
    size = min(len(token_ids), PIECE_TOKENS)
    reference, others, tallies = OneText(model, model.kv_groups(REFERENCE), size), {}, {}
    for name in FORMAT_BYTES:
        if name == REFERENCE:
            continue
        try:
            others[name], tallies[name] = OneText(model, model.kv_groups(name), size), Tally()
        except OctavoError as error:
            notes.append(f"{name} was not measured: {error}")
    for start in range(0, len(token_ids), size):
        piece = token_ids[start : start + size]
        runs = {name: text.chunks(piece) for name, text in others.items()}
        for first, logits in reference.chunks(piece):
            expected, after = Expected.of(logits), piece[first + 1 : first + 1 + len(logits)]
            for name, run in runs.items():
                _, found = next(run)
                tallies[name].add(found, expected, after)
    for name, tally in tallies.items():
        yield _measured(name, tally.distance())


def _measured(name: str, distance: Distance) -> Measured:
    error = (distance.top1 * (1 - distance.top1) / distance.num_tokens) ** 0.5
    return Measured(
        name,
        kl_mean=distance.kl_mean,
        kl_p99=distance.kl_p99,
        top1=distance.top1,
        source="measured now",
        is_good=distance.kl_mean <= _LIMITS.max_kl and distance.top1 + 2 * error >= _LIMITS.min_top1,
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
