"""Fewer KV heads for a model: K and V heads are pooled by their mean, so that the cache shrinks in proportion.

The first step of uptraining in Ainslie et al. 2023 (GQA, arXiv:2305.13245, section 2.1); the second, training the model
on, is not done here, and without it quality is lost. It knows the Llama family's tensors, no tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.kernels.ops import F32
from octavo.models.config import RopeConfig
from octavo.models.json_file import read_json
from octavo.models.llama_config import MODEL_TYPES, LlamaConfig
from octavo.models.llama_weights import llama_parts
from octavo.models.loader import ModelSource
from octavo.models.packing import read_bias, read_rows, read_tensor
from octavo.models.parts import Rows
from octavo.models.saved import SAVED_DTYPES, SavedTensor, write_model

_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Pooled:
    """What was saved."""

    config: LlamaConfig
    dtype: str  # of the saved weights
    num_bytes: int


def check_kv_heads(source: ModelSource, num_kv_heads: int) -> LlamaConfig:
    """The config of the pooled model. Raises ConfigError or ModelError for what cannot be pooled so."""
    config = source.config
    if not isinstance(config, LlamaConfig):
        raise ModelError(
            f"the KV heads of a {config.architecture} cannot be pooled; choose a model of one of "
            f"{', '.join(MODEL_TYPES.values())}"
        )
    fewer = [count for count in range(1, config.num_kv_heads) if config.num_kv_heads % count == 0]
    if num_kv_heads not in fewer:
        choices = f"choose one of {', '.join(map(str, fewer))}" if fewer else "it has no head to spare"
        raise ConfigError(f"--kv-heads is {num_kv_heads} and the model has {config.num_kv_heads} KV heads; {choices}")
    if "rope_freqs.weight" in source.weights.file.tensors:
        raise ModelError(
            f"{source.path} has its rope as a table (rope_freqs.weight), which a config.json cannot say; give the "
            "model's directory of safetensors"
        )
    return dataclasses.replace(config, num_kv_heads=num_kv_heads)


def pool_kv_heads(source: ModelSource, num_kv_heads: int, directory: Path) -> Pooled:
    """Save the model with so many KV heads into an empty directory, in its own dtype (quantised ones as bf16)."""
    pooled = check_kv_heads(source, num_kv_heads)
    dtype = pooled.dtype if pooled.dtype in SAVED_DTYPES else "bf16"
    tensors = [*_matrices(source, pooled), *_vectors(source, pooled)]
    num_bytes = write_model(directory, _config_json(source, pooled, dtype), tensors, dtype)
    return Pooled(pooled, dtype, num_bytes)


def _matrices(source: ModelSource, pooled: LlamaConfig) -> Iterator[SavedTensor]:
    """Both lists of parts name the same rows in the same order: those of the source, and those that are saved."""
    file, before = source.weights.file, source.config.num_kv_heads  # type: ignore[attr-defined]
    for theirs, ours in zip(source.weights.parts.matrices, llama_parts(pooled, is_gguf=False).matrices, strict=True):
        for place, (old, new) in enumerate(zip(theirs.rows, ours.rows, strict=True)):
            is_pooled = ours.key.endswith(".qkv") and place > 0
            heads = (before, pooled.num_kv_heads) if is_pooled else None
            yield SavedTensor(new.tensor, new.shape, _reader(read_rows, file, old, heads))
            if new.bias is not None:
                yield SavedTensor(new.bias, new.bias_shape, _reader(read_bias, file, old, heads))


def _reader(
    read: Callable[[Any, Rows], F32], file: Any, rows: Rows, heads: tuple[int, int] | None
) -> Callable[[], F32]:
    return lambda: read(file, rows) if heads is None else mean_heads(read(file, rows), *heads)


def mean_heads(rows: F32, before: int, after: int) -> F32:
    """rows [before * head_dim, ...] -> [after * head_dim, ...]: the mean of each before / after neighbours.

    Query head h reads KV head h // (num_heads / num_kv_heads), so the queries of neighbours read their mean.
    """
    heads = rows.reshape(after, before // after, -1, *rows.shape[1:])
    pooled: F32 = heads.mean(axis=1).reshape(-1, *rows.shape[1:])
    return pooled


def _vectors(source: ModelSource, pooled: LlamaConfig) -> Iterator[SavedTensor]:
    file = source.weights.file
    theirs = {vector.key: vector.tensor for vector in source.weights.parts.vectors}
    for vector in llama_parts(pooled, is_gguf=False).vectors:

        def read(name: str = theirs[vector.key]) -> F32:
            return read_tensor(file, name)

        yield SavedTensor(vector.tensor, vector.shape, read)


def _config_json(source: ModelSource, pooled: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The model's own with another number of KV heads; for a GGUF file, one that says the same."""
    changes = {"num_key_value_heads": pooled.num_kv_heads, "torch_dtype": _TORCH_NAMES[dtype]}
    if source.path.is_dir() and (source.path / "config.json").exists():
        return {**read_json(source.path / "config.json"), **changes}
    architecture = pooled.architecture
    if pooled.windows and architecture == "LlamaForCausalLM":
        architecture = "MistralForCausalLM"  # GGUF has one name for both
    kinds = {name: kind for kind, name in MODEL_TYPES.items()}
    return {
        "architectures": [architecture],
        "model_type": kinds[architecture],
        "vocab_size": pooled.vocab_size,
        "hidden_size": pooled.hidden_size,
        "intermediate_size": pooled.intermediate_size,
        "num_hidden_layers": pooled.num_layers,
        "num_attention_heads": pooled.num_heads,
        "head_dim": pooled.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": pooled.rms_norm_eps,
        "max_position_embeddings": pooled.max_position_embeddings,
        "rope_theta": pooled.rope.theta,
        "rope_scaling": _rope_json(pooled.rope),
        "tie_word_embeddings": pooled.tie_word_embeddings,
        "attention_bias": pooled.output_bias,
        "mlp_bias": pooled.mlp_bias,
        "sliding_window": pooled.windows[0] if pooled.windows else None,
        **changes,
    }


def _rope_json(rope: RopeConfig) -> dict[str, Any] | None:
    """Of what GGUF metadata can say."""
    if rope.kind == "default":
        return None
    found: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        found["original_max_position_embeddings"] = rope.original_max_positions
    return found
