"""What every model's config has, whatever its family, and the checks that the families share.

It knows no file format and no tensor. A family's own sizes are in its own dataclass, in its own file.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError, ModelError

# Each is read by the family of that name in `families`; a test holds the two equal. Here, because whoever only lists
# aliases must not load the families.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "OPTForCausalLM",
    "FalconForCausalLM",
)
SUPPORTED_ROPE_KINDS = ("default", "linear", "llama3", "yarn")

_MAX_HEAD_DIM = 256  # the kernels' bound
_HEAD_DIM_STEP = 16  # the kernels' vector

# Bounds far above every real model: a hostile file gets an error before anything is allocated by its numbers.
_BOUNDS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": 4096,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "num_experts": 4096,
    "max_position_embeddings": 1 << 31,
}


class ModelConfig(Protocol):
    """What the executor, the planner and the front ends need to know about a model. Each family has a dataclass."""

    @property
    def architecture(self) -> str: ...  # one of SUPPORTED_ARCHITECTURES
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...  # of queries
    @property
    def max_position_embeddings(self) -> int: ...  # the longest context, in tokens
    @property
    def dtype(self) -> str: ...  # what most weights are stored as: "f32", "f16", "bf16", "q4_1" ...


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which angle each pair of dimensions turns by per position."""

    theta: float
    kind: str = "default"  # one of SUPPORTED_ROPE_KINDS
    factor: float = 1.0  # linear, llama3, yarn: how much longer than trained
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 0  # llama3, yarn: context of the first training
    beta_fast: float = 32.0  # yarn: turns within that context above which a pair is kept as it is
    beta_slow: float = 1.0  # yarn: turns below which it is slowed by the factor
    is_truncated: bool = True  # yarn: the bounds are whole pairs
    magnitude: float = 1.0  # yarn: what cos and sin are multiplied by

    def __post_init__(self) -> None:
        if self.kind not in SUPPORTED_ROPE_KINDS:
            raise ModelError(
                f"rope type {reprlib.repr(self.kind)} is not supported yet; supported are "
                f"{', '.join(SUPPORTED_ROPE_KINDS)}: choose a model (or a revision of it) with one of these"
            )
        check_number("rope theta", self.theta)
        check_number("rope scaling factor", self.factor)
        if self.kind not in ("llama3", "yarn"):
            return
        low, high = ("beta_slow", "beta_fast") if self.kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        check_number(f"rope {low}", getattr(self, low))
        check_number(f"rope {high}", getattr(self, high))
        check_number("rope magnitude", self.magnitude)
        if getattr(self, high) <= getattr(self, low):
            raise ModelError(
                f"rope {high} is {getattr(self, high)}; it must be above {low}, which is {getattr(self, low)}: the "
                "model's config is damaged"
            )
        if not 0 < self.original_max_positions <= _BOUNDS["max_position_embeddings"]:
            raise ModelError(
                f"rope original_max_position_embeddings is {self.original_max_positions}; it must be 1 to "
                f"{_BOUNDS['max_position_embeddings']}: the model's config is damaged"
            )


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise ModelError for a size of 0, a negative one, or one far above every real model."""
    for name, value in sizes.items():
        most = _BOUNDS.get(name, _BOUNDS["hidden_size"])
        if not 1 <= value <= most:
            raise ModelError(f"{name} is {value}; it must be 1 to {most}: the model's config is damaged")


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ModelError for heads that cannot be shared out, or that the kernels cannot hold."""
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{num_heads} attention heads cannot be shared out among {num_kv_heads} key-value heads: "
            "the first number must be a multiple of the second; the model's config is damaged"
        )
    if head_dim % _HEAD_DIM_STEP or not _HEAD_DIM_STEP <= head_dim <= _MAX_HEAD_DIM:
        raise ModelError(
            f"head_dim {head_dim} is not supported; it must be a multiple of {_HEAD_DIM_STEP}, at most "
            f"{_MAX_HEAD_DIM}: choose another model"
        )


def check_windows(windows: tuple[int | None, ...]) -> None:
    for window in windows:
        if window is not None and window < 1:
            raise ModelError(f"sliding_window is {window}; it must be at least 1 token: the model's config is damaged")


def check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"{name} is {value}; it must be a positive number: the model's config is damaged")


def check_experts(num_experts: int, num_chosen: int) -> None:
    check_sizes({"num_experts": num_experts})
    if not 1 <= num_chosen <= num_experts:
        raise ModelError(
            f"num_experts_per_tok is {num_chosen}; it must be 1 to the {num_experts} experts that there are: the "
            "model's config is damaged"
        )


def check_context(config: ModelConfig, max_model_len: int) -> None:
    """Raise ConfigError where `max_model_len` tokens (prompt and output) are more than the model can have."""
    most = config.max_position_embeddings
    if max_model_len < 1:
        raise ConfigError(f"--max-model-len is {max_model_len}; it must be 1 to {most} for this model")
    if max_model_len > most:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {most} positions that this model was made for; choose "
            f"at most {most}"
        )


def refuse_architecture(name: str) -> ModelError:
    """The error for an architecture that octavo cannot run: what it is, what there is instead."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    return ModelError(
        f"architecture {reprlib.repr(name)} is not supported; supported are {supported}: choose a model of one of these"
    )
