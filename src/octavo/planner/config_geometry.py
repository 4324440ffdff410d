"""From a model's config to its geometry. It reads no file and asks no engine.

Multimodal configs are read by their language part; what sees and hears is outside of the cache and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.planner.draft import Draft
from octavo.planner.families import DEFAULTS, FAMILIES, find_family, names_of
from octavo.planner.fields import Fields
from octavo.planner.geometry import Geometry, KVGroup
from octavo.planner.quantisation import quantisation_of

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16", "float": "f32", "float64": "f32"}
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
_DEFAULT_CONTEXT = 2048


def geometry_of(
    values: Mapping[str, Any],
    model: str,
    *,
    companion: Mapping[str, Any] | None = None,
    treat_as: str | None = None,
) -> Geometry:
    """The geometry of a config. `companion`: the object of an `hf_quant_config.json` beside it.

    Raises ModelError for an unknown architecture (unless `treat_as` names a family) and for what does not fit together.
    """
    if "quantization" in values and "num_hidden_layers" not in values and "model_type" not in values:
        raise ModelError(
            f"{model} is the companion of a config (hf_quant_config.json); give the config.json or its directory: the "
            "companion beside it is read too"
        )
    fields, outer = _language_part(Fields(values, model))
    family = find_family(fields, treat_as)
    draft = Draft(_with_layers(fields.filled(DEFAULTS.get(family, {}))))
    FAMILIES[family](draft)
    fields = draft.fields
    num_heads = fields.integer("num_attention_heads")
    architecture = (names_of(outer) or [family])[-1]
    notes = list(draft.notes)
    if outer is not fields and outer.values is not fields.values and _has_other_parts(outer):
        notes.append("the language model only: what sees and hears is not counted")
    speculative = fields.integer("num_nextn_predict_layers", fields.integer("num_mtp_modules", 0, least=0), least=0)
    if speculative:
        notes.append(f"{speculative} layers for speculation (multi-token prediction) are not counted")
    return Geometry(
        model=model,
        architecture=architecture,
        family=family,
        attention=attention_name(draft.groups, num_heads),
        num_layers=draft.num_layers,
        hidden_size=draft.hidden,
        num_heads=num_heads,
        vocab_size=draft.vocab,
        max_context=fields.integer("max_position_embeddings", _DEFAULT_CONTEXT),
        dtype=_dtype(fields, outer),
        groups=tuple(sorted(draft.groups, key=lambda group: group.layer_indices)),
        tensors=tuple(draft.tensors),
        quantisation=quantisation_of(fields, outer, companion),
        score_dim=draft.score_dim,
        mix_dim=draft.mix_dim,
        exact=draft.exact,
        notes=tuple(notes),
        given=fields.values,
    )


def _language_part(outer: Fields) -> tuple[Fields, Fields]:
    for key in _TEXT_PARTS:
        section = outer.section(key)
        if section is not None and not outer.has("num_hidden_layers"):
            values = dict(section.values)
            for shared in ("torch_dtype", "dtype", "quantization_config"):
                if values.get(shared) is None and outer.values.get(shared) is not None:
                    values[shared] = outer.values[shared]
            if outer.values.get("tie_word_embeddings") is not None:  # the whole model decides over its parts
                values["tie_word_embeddings"] = outer.values["tie_word_embeddings"]
            if not names_of(Fields(values, outer.name)):
                values["model_type"] = outer.values.get("model_type")
            inner = Fields(values, outer.name)
            return _language_part(inner)[0], outer
    return outer, outer


def _with_layers(fields: Fields) -> Fields:
    """Some configs list their layers and do not count them."""
    for key in ("layers_block_type", "block_configs"):
        listed = fields.get(key)
        if isinstance(listed, list):
            return fields.filled({"num_hidden_layers": len(listed)})
    return fields


def _has_other_parts(outer: Fields) -> bool:
    return any(isinstance(outer.values.get(key), Mapping) for key in _TEXT_PARTS)


def _dtype(fields: Fields, outer: Fields) -> str:
    name = fields.get("dtype") or outer.get("dtype")
    return DTYPES.get(str(name).removeprefix("torch."), "bf16" if name else "f16")


def attention_name(groups: list[KVGroup], num_heads: int) -> str:
    """MHA, MQA, GQA or MLA, and what else the layers do."""
    names = []
    if any(group.kind == "latent" for group in groups):
        names.append("MLA")
    heads = {group.num_kv_heads for group in groups if group.kind in ("full", "window", "chunk")}
    if heads:
        names.append("MHA" if heads == {num_heads} else "MQA" if heads == {1} else "GQA")
    if any(group.window is not None and group.kind != "chunk" for group in groups):
        names.append("window")
    for kind, name in (("chunk", "chunk"), ("index", "sparse index"), ("state", "state")):
        if any(group.kind == kind for group in groups):
            names.append(name)
    if any(group.tokens_per_entry > 1 for group in groups):
        names.append("compressed")
    return " + ".join(names) if names else "none"
