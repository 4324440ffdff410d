"""Typed access to the fields of a Hugging Face config.json, and what every family reads from it alike. No files."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import RopeConfig
from octavo.models.yarn import yarn_rope

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Fields:
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

    def optional_number(self, name: str, default: float | None) -> float | None:
        """None where the file says null."""
        if name in self.data and self.data[name] is None:
            return None
        return None if default is None and name not in self.data else self.number(name, default)

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """None where the file says null."""
        if name in self.data and self.data[name] is None:
            return None
        return None if default is None and name not in self.data else self.integer(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise ModelError(f"config.json: {name} is {reprlib.repr(value)}; it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if type(value) is not str:
            raise ModelError(f"config.json: {name} is {reprlib.repr(value)}; it must be text")
        return value

    def refuse_other(self, name: str, *supported: object) -> None:
        """ModelError where the field has a value that is not one of those; absent or null is fine."""
        value = self.data.get(name)
        if value is not None and value not in supported:
            only = " or ".join(repr(one) for one in supported)
            raise ModelError(
                f"config.json: {name} {reprlib.repr(value)} is not supported; the only one is {only}: choose another "
                "model"
            )

    def _get(self, name: str, default: object) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"config.json has no {name!r}; the file is incomplete: download the model again")
        return default


def named_architecture(data: Mapping[str, Any], by_model_type: Mapping[str, str]) -> str:
    """What `architectures` says, or else what `model_type` stands for."""
    named = data.get("architectures")
    if named is None:
        model_type = data.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError("config.json names neither 'architectures' nor 'model_type'; it is not a model's config")
        named = [by_model_type.get(model_type, model_type)]
    if not (isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)):
        raise ModelError(f"config.json: architectures is {reprlib.repr(named)}; it must be a list of one name")
    return named[0]


def refuse_quantised(data: Mapping[str, Any]) -> None:
    quantization = data.get("quantization_config") or data.get("compression_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"weights quantised with {method!r} are not supported (quantization_config in config.json); supported are "
            "f32, f16 and bf16 safetensors, and GGUF files: choose the unquantised model or a GGUF of it"
        )


def num_kv_heads(fields: Fields, num_heads: int, default: int | None = None) -> int:
    """`num_key_value_heads`, where null means as many as heads."""
    if "num_key_value_heads" in fields.data and fields.data["num_key_value_heads"] is None:
        return num_heads
    return fields.integer("num_key_value_heads", default or num_heads)


def equal_share(hidden_size: int, num_heads: int) -> int:
    """The head_dim of a config that gives none."""
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelError(
            f"config.json gives no head_dim, and hidden_size {hidden_size} is not a multiple of {num_heads} heads"
        )
    return hidden_size // num_heads


def layer_windows(fields: Fields, num_layers: int, window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` where the file has it, `default` elsewhere."""
    types = fields.data.get("layer_types") or default
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise ModelError(
            f"config.json: layer_types is {reprlib.repr(types)}; it must be a list of full_attention and "
            "sliding_attention"
        )
    if len(types) != num_layers:
        raise ModelError(f"config.json: layer_types names {len(types)} layers and num_hidden_layers is {num_layers}")
    return tuple(known[kind] for kind in types)


def rope_scaling(data: Mapping[str, Any], key: str | None = None) -> Mapping[str, Any]:
    """Two spellings, rope_scaling and rope_parameters; where it has one object a kind of layer, that of `key`."""
    found = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if isinstance(found, dict) and key is not None and isinstance(found.get(key), dict):
        found = found[key]
    if not isinstance(found, dict):
        raise ModelError(f"config.json: rope_scaling is {reprlib.repr(found)}; it must be an object or null")
    return found


def read_rope(fields: Fields, max_positions: int, scaling: Mapping[str, Any], theta: float = 10000.0) -> RopeConfig:
    """`scaling` has "rope_type" or "type", and may have the rope_theta that stands beside it elsewhere."""
    data = Fields({"rope_theta": fields.data.get("rope_theta"), **scaling})
    partial = Fields({"partial_rotary_factor": fields.data.get("partial_rotary_factor"), **scaling})
    if partial.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported; choose another model")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = data.number("rope_theta", theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=data.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=data.number("factor"),
            low_freq_factor=data.number("low_freq_factor"),
            high_freq_factor=data.number("high_freq_factor"),
            original_max_positions=data.integer("original_max_position_embeddings", max_positions),
        )
    if kind == "yarn":
        original = data.integer("original_max_position_embeddings", max_positions)
        return yarn_rope(
            theta,
            data.number("factor", max_positions / max(original, 1)),
            original,
            beta_fast=data.number("beta_fast", 32.0),
            beta_slow=data.number("beta_slow", 1.0),
            is_truncated=data.flag("truncate", True),
            attention_factor=data.optional_number("attention_factor", None),
            mscale=data.optional_number("mscale", None),
            mscale_all_dim=data.optional_number("mscale_all_dim", None),
        )
    return RopeConfig(theta, kind if isinstance(kind, str) else type(kind).__name__)
