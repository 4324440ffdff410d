"""The sizes of a decoder-only model that decide its cache and its time: from a config.json, or by name.

It reads the fields of dense transformers under their usual names. It loads no weights and guesses no architecture:
what has windows, latents or experts is refused, as its cache and its time follow other rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError

_NOT_DENSE = ("kv_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "ssm_cfg", "layer_types")


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    gated_mlp: bool = True  # three matrices instead of two
    tied_head: bool = False

    @property
    def layer_parameters(self) -> int:
        """Numbers in the matrices of all layers."""
        width = self.hidden_size
        attention = width * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = width * self.intermediate_size * (3 if self.gated_mlp else 2)
        return self.num_layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.head_parameters * (1 if self.tied_head else 2)

    def kv_spec(self, block_size: int, kv_format: str = "bf16") -> KVSpec:
        """What the engine would allocate by."""
        layer = LayerGeometry(self.num_kv_heads, self.head_dim, kv_format)
        return KVSpec(build_groups([layer] * self.num_layers), block_size)


_NAMED = (
    ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, 2048, gated_mlp=False, tied_head=True),
    ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096),
    ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096),
    ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096),
    ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True),
)
SHAPES = {one.name: one for one in _NAMED}


def shape_of(reference: str) -> ModelShape:
    """A name of the list, or the path of a config.json. Raises ConfigError."""
    named = SHAPES.get(reference.lower())
    if named is not None:
        return named
    path = Path(reference)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--config is {reference!r}; it must be a config.json, a folder with one, or one of {', '.join(SHAPES)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); give a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give a model's config.json")
    return shape_from_config(config, path.stem if path.stem != "config" else path.parent.name)


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Raises ConfigError for a config that lacks a size, or is of another kind than dense attention."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    strange = [field for field in _NOT_DENSE if config.get(field) and not _all_full(config[field])]
    if strange:
        raise ConfigError(
            f"{name} has {', '.join(strange)}: only dense attention over all tokens is modelled; give a dense "
            f"model's config, or one of {', '.join(SHAPES)}"
        )
    heads = _size(config, name, "num_attention_heads", "n_head")
    width = _size(config, name, "hidden_size", "n_embd", "d_model")
    # OPT and GPT-2 have two matrices in the MLP, four times the width by default.
    activation = str(config.get("hidden_act", config.get("activation_function", "silu"))).lower()
    is_gated = "silu" in activation or "swish" in activation or str(config.get("model_type", "")).startswith("gemma")
    inner = config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 4 * width
    return ModelShape(
        name=name,
        num_layers=_size(config, name, "num_hidden_layers", "n_layer"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)),
        head_dim=int(config.get("head_dim") or width // heads),
        intermediate_size=int(inner),
        vocab_size=_size(config, name, "vocab_size"),
        max_positions=int(config.get("max_position_embeddings") or config.get("n_positions") or 2048),
        gated_mlp=is_gated,
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _all_full(value: object) -> bool:
    return isinstance(value, list) and all(kind == "full_attention" for kind in value)


def _size(config: Mapping[str, Any], name: str, *fields: str) -> int:
    for field in fields:
        value = config.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ConfigError(f"{name}: the config has no positive {' or '.join(fields)}; give a language model's config.json")
