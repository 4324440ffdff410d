"""What a Llama-family model is made of: sizes, biases, norms and rope, as plain numbers that are known to fit together.

It knows no file format and no tensor: `config_json` and `config_gguf` read it, `weight_names` compares it with a file.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass

from octavo.errors import ConfigError, ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_KINDS = ("default", "linear", "llama3")

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
    "max_position_embeddings": 1 << 31,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which angle each pair of dimensions turns by per position."""

    theta: float
    kind: str = "default"  # one of SUPPORTED_ROPE_KINDS
    factor: float = 1.0  # linear, llama3: how much longer than trained
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 0  # llama3: context of the first training

    def __post_init__(self) -> None:
        if self.kind not in SUPPORTED_ROPE_KINDS:
            raise ModelError(
                f"rope type {reprlib.repr(self.kind)} is not supported yet; supported are "
                f"{', '.join(SUPPORTED_ROPE_KINDS)}: choose a model (or a revision of it) with one of these"
            )
        _check_number("rope theta", self.theta)
        _check_number("rope scaling factor", self.factor)
        if self.kind != "llama3":
            return
        _check_number("rope low_freq_factor", self.low_freq_factor)
        _check_number("rope high_freq_factor", self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, which is "
                f"{self.low_freq_factor}: the model's config is damaged"
            )
        if not 0 < self.original_max_positions <= _BOUNDS["max_position_embeddings"]:
            raise ModelError(
                f"rope original_max_position_embeddings is {self.original_max_positions}; it must be 1 to "
                f"{_BOUNDS['max_position_embeddings']}: the model's config is damaged"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass and the KV cache need to know about a model."""

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # of the projection after attention
    mlp_bias: bool = False
    q_k_norm: bool = False  # RMS norm of each head of q and k before rope (Qwen3)
    sliding_window: int | None = None  # tokens that attention sees, where the model limits them
    dtype: str = "f32"  # what most weights are stored as: "f32", "f16", "bf16", "q4_1" ...

    def __post_init__(self) -> None:
        for name, most in _BOUNDS.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ModelError(f"{name} is {value}; it must be 1 to {most}: the model's config is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot be shared out among {self.num_kv_heads} key-value heads: "
                "the first number must be a multiple of the second; the model's config is damaged"
            )
        if self.head_dim % _HEAD_DIM_STEP or not _HEAD_DIM_STEP <= self.head_dim <= _MAX_HEAD_DIM:
            raise ModelError(
                f"head_dim {self.head_dim} is not supported; it must be a multiple of {_HEAD_DIM_STEP}, at most "
                f"{_MAX_HEAD_DIM}: choose another model"
            )
        _check_number("rms_norm_eps", self.rms_norm_eps)
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"sliding_window is {self.sliding_window}; it must be at least 1: the config is damaged")

    @property
    def max_context(self) -> int:
        """The longest context, in tokens, that octavo can give exact answers for."""
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)

    def check_context(self, max_model_len: int) -> None:
        """Raise ConfigError where `max_model_len` tokens (prompt and output) are more than the model can have."""
        if max_model_len < 1:
            raise ConfigError(f"--max-model-len is {max_model_len}; it must be 1 to {self.max_context} for this model")
        if max_model_len > self.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the {self.max_position_embeddings} positions that this "
                f"model was made for; choose at most {self.max_context}"
            )
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than this model's attention window of {self.sliding_window} "
                f"tokens, and contexts longer than the window are not supported yet; choose at most {self.max_context}"
            )


def refuse_architecture(name: str) -> ModelError:
    """The error for an architecture that octavo cannot run: what it is, what there is instead."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    lower = name.lower()
    if "gemma" in lower:
        why = "is not supported yet: its alternating attention windows are still missing"
    elif "moe" in lower or "mixtral" in lower:
        why = "is not supported: it is a mixture of experts"
    else:
        why = "is not supported"
    return ModelError(
        f"architecture {reprlib.repr(name)} {why}; supported are {supported}: choose a model of one of these"
    )


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelError(f"{name} is {value}; it must be a positive number: the model's config is damaged")
