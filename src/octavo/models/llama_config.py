"""What a model of the Llama family is made of, read from a config.json or from GGUF metadata. It knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import RopeConfig, check_heads, check_number, check_sizes, check_windows
from octavo.models.config_gguf import Keys, head_dim_of, refuse_experts, rope_of, vocab_size_of
from octavo.models.config_json import Fields, equal_share, layer_windows, num_kv_heads, read_rope, rope_scaling

_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Everything that the forward pass and the KV cache need to know about a model."""

    architecture: str
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
    windows: tuple[int | None, ...] = ()  # tokens that each layer sees, itself included; None: all; (): all in all
    dtype: str = "f32"  # what most weights are stored as: "f32", "f16", "bf16", "q4_1" ...

    def __post_init__(self) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes({name: getattr(self, name) for name in (*names, "max_position_embeddings")})
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_windows(self.windows)

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class _Silence:
    """What a config.json leaves unsaid: the defaults of the architecture's config class in transformers."""

    model_type: str
    num_kv_heads: int | None  # None: as many as heads
    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool = False
    q_k_norm: bool = False


_SILENCE = {
    "LlamaForCausalLM": _Silence("llama", None, 2048),
    "MistralForCausalLM": _Silence("mistral", 8, 131072),
    "Qwen2ForCausalLM": _Silence("qwen2", 32, 32768, qkv_bias=True),
    "Qwen3ForCausalLM": _Silence("qwen3", 32, 32768, head_dim=128, q_k_norm=True),
}
MODEL_TYPES = {silence.model_type: name for name, silence in _SILENCE.items()}
GGUF_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def llama_from_json(architecture: str, fields: Fields) -> LlamaConfig:
    silence = _SILENCE[architecture]
    _refuse_what_is_missing(fields.data)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    has_bias = fields.flag("attention_bias") and silence.model_type in ("llama", "qwen3")
    max_positions = fields.integer("max_position_embeddings", silence.max_position_embeddings)
    num_layers = fields.integer("num_hidden_layers")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, num_heads, silence.num_kv_heads),
        head_dim=fields.integer("head_dim", silence.head_dim or equal_share(hidden_size, num_heads)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, max_positions, rope_scaling(fields.data)),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=silence.qkv_bias or has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias") and silence.model_type == "llama",
        q_k_norm=silence.q_k_norm,
        windows=_windows(fields, silence, num_layers),
    )


def _refuse_what_is_missing(data: Mapping[str, Any]) -> None:
    for name in _EXPERT_FIELDS:
        if data.get(name):
            raise ModelError(
                f"config.json: {name} is {data[name]!r}, and this architecture has no experts: the config is damaged; "
                "download it again"
            )
    Fields(data).refuse_other("hidden_act", "silu", "swish")


def _windows(fields: Fields, silence: _Silence, num_layers: int) -> tuple[int | None, ...]:
    """Of Mistral all layers; of Qwen, where it is switched on, those that layer_types or max_window_layers names."""
    if silence.model_type == "mistral":
        window = fields.optional_integer("sliding_window", 4096)
        return (window,) * num_layers if window is not None else ()
    if silence.model_type == "llama" or not 1 <= num_layers <= 4096:
        return ()
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    first = fields.integer("max_window_layers", 28)
    default = [
        "sliding_attention" if window is not None and i >= first else "full_attention" for i in range(num_layers)
    ]
    found = layer_windows(fields, num_layers, window, default)
    return found if any(one is not None for one in found) else ()


def llama_from_gguf(keys: Keys) -> LlamaConfig:
    refuse_experts(keys)
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    num_layers, window = keys.integer("block_count"), keys.integer("attention.sliding_window", 0)
    return LlamaConfig(
        architecture=GGUF_NAMES[keys.architecture],
        vocab_size=vocab_size_of(keys),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim_of(keys, hidden_size, num_heads),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope_of(keys),
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in keys.shapes,
        qkv_bias="blk.0.attn_q.bias" in keys.shapes,
        output_bias="blk.0.attn_output.bias" in keys.shapes,
        mlp_bias="blk.0.ffn_up.bias" in keys.shapes,
        q_k_norm="blk.0.attn_q_norm.weight" in keys.shapes,
        windows=(window,) * num_layers if window and num_layers <= 4096 else (),
    )
