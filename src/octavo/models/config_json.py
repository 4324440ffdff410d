"""From the dict of a Hugging Face config.json to a ModelConfig. It knows field names and their defaults, no files."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, RopeConfig, refuse_architecture


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config.json leaves unsaid: the defaults of the architecture's config class in transformers."""

    model_type: str
    num_kv_heads: int | None  # None: as many as heads
    max_position_embeddings: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    window_is_optional: bool = False  # used only with use_sliding_window
    qkv_bias: bool = False
    q_k_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", None, 2048),
    "MistralForCausalLM": _Family("mistral", 8, 131072, sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", 32, 32768, window_is_optional=True, qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", 32, 32768, head_dim=128, window_is_optional=True, q_k_norm=True),
}
_BY_MODEL_TYPE = {family.model_type: name for name, family in _FAMILIES.items()}
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to the fields of an object; an error names field, value and what is expected."""

    data: Mapping[str, Any]

    def integer(self, name: str, default: object = _MISSING) -> int:
        value = self._get(name, default)
        if type(value) is not int:
            raise ModelError(f"config.json: {name} is {reprlib.repr(value)}; it must be a whole number")
        return value

    def number(self, name: str, default: object = _MISSING) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float):
            raise ModelError(f"config.json: {name} is {reprlib.repr(value)}; it must be a number")
        try:
            return float(value)
        except OverflowError:
            raise ModelError(f"config.json: {name} is larger than any real number in use") from None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise ModelError(f"config.json: {name} is {reprlib.repr(value)}; it must be true or false")
        return value

    def _get(self, name: str, default: object) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"config.json has no {name!r}; the file is incomplete: download the model again")
        return default


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes, dtype left at f32; ModelError for everything that octavo cannot run."""
    architecture = _architecture(data)
    family = _FAMILIES[architecture]
    _refuse_what_is_missing(data)
    fields = _Fields(data)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    has_bias = fields.flag("attention_bias") and family.model_type in ("llama", "qwen3")
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(data, family, num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or _equal_share(hidden_size, num_heads)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(data, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias") and family.model_type == "llama",
        q_k_norm=family.q_k_norm,
        sliding_window=_sliding_window(data, family),
    )


def _architecture(data: Mapping[str, Any]) -> str:
    named = data.get("architectures")
    if named is None:
        model_type = data.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError("config.json names neither 'architectures' nor 'model_type'; it is not a model's config")
        named = [_BY_MODEL_TYPE.get(model_type, model_type)]
    if not (isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)):
        raise ModelError(f"config.json: architectures is {reprlib.repr(named)}; it must be a list of one name")
    if named[0] not in _FAMILIES:
        raise refuse_architecture(named[0])
    return named[0]


def _refuse_what_is_missing(data: Mapping[str, Any]) -> None:
    quantization = data.get("quantization_config") or data.get("compression_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"weights quantised with {method!r} are not supported (quantization_config in config.json); supported are "
            "f32, f16 and bf16 safetensors, and GGUF files: choose the unquantised model or a GGUF of it"
        )
    for name in _EXPERT_FIELDS:
        if data.get(name):
            raise ModelError(
                f"config.json: {name} is {reprlib.repr(data[name])}: mixtures of experts are not supported; "
                "choose a dense model"
            )
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {reprlib.repr(activation)} is not supported; the only one is 'silu'")


def _num_kv_heads(data: Mapping[str, Any], family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" in data and data["num_key_value_heads"] is None:
        return num_heads
    return _Fields(data).integer("num_key_value_heads", family.num_kv_heads or num_heads)


def _equal_share(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(
            f"config.json gives no head_dim, and hidden_size {hidden_size} is not a multiple of {num_heads} heads"
        )
    return hidden_size // num_heads


def _sliding_window(data: Mapping[str, Any], family: _Family) -> int | None:
    """The window that all layers have, or None."""
    fields = _Fields(data)
    is_windowed = not family.window_is_optional or fields.flag("use_sliding_window")
    layer_types = data.get("layer_types") or []
    if is_windowed and family.window_is_optional:
        raise ModelError(
            "config.json: use_sliding_window is true, and attention windows in some layers are not supported yet; "
            "set it to false where the context is not longer than sliding_window, or choose another model"
        )
    if not isinstance(layer_types, list) or (not is_windowed and "sliding_attention" in layer_types):
        raise ModelError("config.json: layer_types names sliding_attention layers, which are not supported yet")
    if family.model_type == "llama" or not is_windowed:
        return None
    if "sliding_window" in data and data["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", family.sliding_window)


def _rope(data: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Three spellings: rope_theta + rope_scaling {"rope_type"} or {"type"}, and rope_parameters with all in one."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_scaling is {reprlib.repr(scaling)}; it must be an object or null")
    fields = _Fields({"rope_theta": data.get("rope_theta"), **scaling})
    partial = _Fields({"partial_rotary_factor": data.get("partial_rotary_factor"), **scaling})
    if partial.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported; choose another model")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = fields.number("rope_theta", 10000.0)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=fields.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_positions=fields.integer("original_max_position_embeddings", max_positions),
        )
    return RopeConfig(theta, kind if isinstance(kind, str) else type(kind).__name__)
