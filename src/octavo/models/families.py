"""Every family of models, by architecture. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models import deepseek, falcon, gemma, gpt, gpt_oss, llama, mixtral
from octavo.models.config import ModelConfig, refuse_architecture
from octavo.models.config_gguf import Keys, Shapes, refuse_unknown_arithmetic
from octavo.models.config_json import Fields, named_architecture, refuse_quantised
from octavo.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    gemma.FAMILY,
    mixtral.FAMILY,
    gpt_oss.FAMILY,
    deepseek.FAMILY,
    gpt.FAMILY,
    gpt.OPT_FAMILY,
    falcon.FAMILY,
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_MODEL_TYPE = {kind: name for family in FAMILIES for kind, name in family.model_types.items()}
_BY_GGUF_NAME = {kind: family for family in FAMILIES for kind in family.gguf_names}


def family_of(config: ModelConfig) -> Family:
    return _BY_ARCHITECTURE[config.architecture]


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes, dtype left at f32; ModelError for everything that octavo cannot run."""
    architecture = named_architecture(data, _BY_MODEL_TYPE)
    if architecture not in _BY_ARCHITECTURE:
        raise refuse_architecture(architecture)
    refuse_quantised(data)
    config: ModelConfig = _BY_ARCHITECTURE[architecture].from_json(architecture, Fields(data))
    return config


def config_from_gguf(metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """The config of a file with this metadata and tensors of these shapes; dtype is left at f32."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError("the GGUF file does not say its general.architecture; it is not a language model's file")
    keys = Keys(metadata, name, shapes)
    has_experts = name == "llama" and keys.integer("expert_count", 0) > 0  # so Mixtral's files call themselves
    family = _BY_GGUF_NAME.get(f"{name} of experts" if has_experts else name)
    if family is None or family.from_gguf is None:
        raise refuse_architecture(name)
    refuse_unknown_arithmetic(keys)
    config: ModelConfig = family.from_gguf(keys)
    return config
