"""Parameters and KV geometry of every family against the models that transformers builds from the same config."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.planner.config_geometry import geometry_of
from octavo.planner.families import ALSO, DEFAULTS, FAMILIES
from octavo.planner.geometry import KVGroup
from tests.planner.small_configs import CASES


def transformers_model(model_type: str, config: dict[str, Any]) -> Any:
    """The model class on torch's meta device: shapes, and no memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM, MllamaForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        made = CONFIG_MAPPING[model_type](**config)
        with torch.device("meta"):
            if model_type == "mllama_text_model":  # which the automatic class does not know
                return MllamaForCausalLM(made)
            return AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    model_type, config = CASES[name]
    geometry = geometry_of({"model_type": model_type, **config}, name)
    theirs = sum(parameter.numel() for parameter in transformers_model(model_type, config).parameters())
    assert geometry.parameters == theirs


def test_every_family_has_a_case_or_a_reason() -> None:
    without = {
        "baichuan": "not in transformers; Llama without biases",
        "chatglm": "not in transformers",
        "deepseek": "not in transformers; its parts are those of deepseek_v3 and llama",
        "internlm": "not in transformers; Llama with a key `bias`",
        "internlm2": "not in transformers; Llama",
        "minicpm": "not in transformers; Llama with a tied head",
        "mimo": "not in transformers; Qwen2",
        "orion": "not in transformers; Llama with layer norms",
        "qwen": "not in transformers",
        "yi": "is Llama",
        "deci": "not in transformers",
        "ministral": "is Mistral",
        "ministral3": "is Mistral",
        "step3p7": "transformers has its multimodal class only",
        "kimi_linear": "checked on its real config by `make validate`",
        "dbrx": "checked on its real config by `make validate`",
        "mllama": "checked on its real config by `make validate`",
        "mimo_v2_flash": "checked on its real config by `make validate`",
        "deepseek_v32": "checked on its real config by `make validate`",
        "deepseek_v4": "checked on its real config by `make validate`",
        "minimax_m3": "checked on its real config by `make validate`",
    }
    tested = {geometry_of({"model_type": kind, **config}, name).family for name, (kind, config) in CASES.items()}
    assert tested | set(without) == set(FAMILIES)
    assert not tested & set(without)
    assert set(ALSO.values()) <= set(FAMILIES)
    assert set(DEFAULTS) <= set(FAMILIES)


def groups(name: str, **changes: Any) -> dict[str, KVGroup]:
    model_type, config = CASES[name]
    found = geometry_of({"model_type": model_type, **config, **changes}, name).groups
    return {group.name: group for group in found}


def test_windows_alternate_where_the_family_says_so() -> None:
    assert groups("gemma2")["window-64"].layer_indices == (0, 2)
    assert groups("gemma3")["full"].layer_indices == (5,)
    assert groups("gpt_oss")["full"].layer_indices == (1, 3)
    assert groups("cohere2")["full"].layer_indices == (3,)
    assert groups("mistral")["window-64"].num_layers == 4
    assert set(groups("mistral", sliding_window=None)) == {"full"}


def test_qwen_has_a_window_only_where_it_is_switched_on() -> None:
    off = {"sliding_window": 64, "max_window_layers": 2}
    assert set(groups("qwen2", **off)) == {"full"}
    on = groups("qwen2", **off, use_sliding_window=True)
    assert on["window-64"].layer_indices == (2, 3)


def test_chunks_of_llama4() -> None:
    found = groups("llama4", attention_chunk_size=128)
    assert found["chunk-128"].layer_indices == (0, 1, 2, 4, 5, 6)
    assert found["full"].layer_indices == (3, 7)


def test_a_latent_is_kept_once_for_all_heads() -> None:
    (group,) = groups("deepseek_v3").values()
    assert (group.kind, group.numbers_per_entry, group.num_kv_heads) == ("latent", 32 + 8, 1)


def test_states_are_fixed_and_their_layers_keep_no_tokens() -> None:
    found = groups("qwen3_next")
    assert found["full"].layer_indices == (3,)
    state = found["state"]
    assert state.layer_indices == (0, 1, 2)
    assert state.state_numbers == 4 * 16 * 24
    assert state.conv_numbers == (2 * 2 * 16 + 4 * 24) * 3
    assert [group.entries(1000) for group in found.values()] == [0, 1000]


def test_layers_that_read_the_kv_of_others_hold_none() -> None:
    held = {layer for group in groups("gemma4 with shared layers").values() for layer in group.layer_indices}
    assert held == set(range(8))
    held = {layer for group in groups("gemma3n").values() for layer in group.layer_indices}
    assert held == set(range(6))


def test_heads_of_their_own_size() -> None:
    found = groups("gemma4 with shared layers")
    assert (found["window-512"].head_dim, found["full"].head_dim) == (16, 32)
    assert groups("qwen3")["full"].head_dim == 32


@pytest.mark.parametrize("config", [{"model_type": "martian"}, {"architectures": ["MartianForCausalLM"]}])
def test_an_unknown_architecture_is_refused_and_never_guessed(config: dict[str, Any]) -> None:
    known = CASES["llama"][1]
    with pytest.raises(ModelError, match="treat-as"):
        geometry_of({**known, **config}, "m")
    assert geometry_of({**known, **config}, "m", treat_as="llama").parameters > 0
    with pytest.raises(ModelError, match="no family"):
        geometry_of({**known, **config}, "m", treat_as="venusian")


@pytest.mark.parametrize("name", CASES)
def test_the_class_alone_names_the_family(name: str) -> None:
    """Configs without model_type, by what `architectures` of real ones says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, config = CASES[name]
    family = geometry_of({"model_type": kind, **config}, name).family
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    found = geometry_of({"architectures": [class_name], **config}, name).family
    assert found == family or {found, family} <= {"mistral", "ministral"}


def test_a_config_without_any_name_is_refused() -> None:
    with pytest.raises(ModelError, match="names no architecture"):
        geometry_of(CASES["llama"][1], "m")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "at most"),
        ({"num_hidden_layers": "4"}, "whole number"),
        ({"hidden_size": -64}, "whole number"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "hidden_size": 66}, "not a multiple"),
        ({"hidden_size": 66}, "no head_dim"),
        ({"head_dim": 1 << 20}, "at most"),
        ({"attention_bias": "yes"}, "true or false"),
    ],
)
def test_damaged_configs_are_refused_with_their_value(changes: dict[str, Any], match: str) -> None:
    config = {"model_type": "llama", **CASES["llama"][1], **changes}
    if changes.get("num_hidden_layers", 1) is None:
        del config["num_hidden_layers"]
        with pytest.raises(ModelError, match=match):
            geometry_of({**config, "model_type": "qwen2"}, "m")
        return
    with pytest.raises(ModelError, match=match):
        geometry_of(config, "m")


def test_the_companion_alone_is_no_config() -> None:
    with pytest.raises(ModelError, match="companion"):
        geometry_of({"producer": {}, "quantization": {"quant_algo": "FP8"}}, "m")


def test_the_language_part_of_a_multimodal_config_is_read() -> None:
    text = {"model_type": "qwen3_vl_text", **CASES["qwen3"][1], "tie_word_embeddings": True}
    outer = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"hidden_size": 8}}
    tied = geometry_of(outer, "m")
    untied = geometry_of({**outer, "tie_word_embeddings": False}, "m")
    assert untied.parameters - tied.parameters == 300 * 64
    assert "language model only" in " ".join(tied.notes)
