"""What the families beyond Llama refuse: windows, heads, experts and fields that cannot be, each in one sentence."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.families import config_from_gguf, config_from_json
from octavo.models.loader import open_model
from tests.models.tiny_families import FAMILIES, make_family


@cache
def saved(family: str) -> str:
    with TemporaryDirectory() as folder:
        return (make_family(Path(folder) / "model", family) / "config.json").read_text()


def read(family: str, **changes: Any) -> Any:
    return config_from_json({**json.loads(saved(family)), **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_read(family: str) -> None:
    config = read(family)
    assert config.vocab_size == 336
    assert hash(config) == hash(read(family))
    model_type = json.loads(saved(family))["model_type"]
    assert read(family, architectures=None, model_type=model_type) == config


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3", {"sliding_window": 0}, "sliding_window is 0; it must be at least 1 token"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window is 0"),
        ("mixtral", {"sliding_window": -3}, "sliding_window is -3"),
        ("gemma2", {"sliding_window": "4"}, "sliding_window is '4'; it must be a whole number"),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "names 1 layers and num_hidden_layers is 6"),
        ("gemma3", {"layer_types": ["linear_attention"] * 6}, "list of full_attention and sliding_attention"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern 0 of 6 layers"),
        ("gemma3", {"num_hidden_layers": 10**9, "layer_types": None}, "1000000000 layers"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("gemma2", {"head_dim": 24}, "head_dim 24 is not supported; it must be a multiple of 16, at most 256"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0; it must be a positive number"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ("gemma", {"hidden_activation": "relu", "hidden_act": "relu"}, "hidden_activation 'relu' is not supported"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be 1 to the 4 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_experts is 0"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; the only one is 'silu'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias or use_sliding_window is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised with 'mxfp4' are not.*GGUF"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "factor": -2.0}}, "factor is -2.0"),
        ("deepseek_v2", {"kv_lora_rank": 500}, "kv_lora_rank 500 with qk_rope_head_dim 16.*multiples of 16"),
        ("deepseek_v2", {"kv_lora_rank": 640}, "together at most 640"),
        ("deepseek_v2", {"n_group": 3}, "8 experts cannot be in 3 groups"),
        ("deepseek_v2", {"topk_group": 5}, "in 4 groups of which 5 are kept"),
        ("deepseek_v2", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and 2 groups of 2 experts have fewer"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek_v3", {"n_group": 8}, "8 experts cannot be in 8 groups"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {"n_routed_experts": -8}, "num_experts is -8"),
        ("gpt2", {"n_head": 5}, "hidden_size 64 is not a multiple of 5 heads"),
        ("gpt2", {"n_embd": 96}, "head_dim 24 is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
        (
            "gpt2",
            {"activation_function": "mish"},
            "activation_function 'mish' is not supported; supported are gelu_new",
        ),
        ("bigcode", {"multi_query": False}, "multi_query False is not supported"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 is not supported; the only one is 64"),
        ("falcon_7b", {"alibi": True}, "alibi True is not supported; the only one is False"),
        ("falcon_7b", {"parallel_attn": False}, "parallel_attn False is not supported"),
        ("falcon_40b", {"num_kv_heads": 3}, "4 attention heads cannot be shared out among 3 key-value heads"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 0.5}}, "must be above"),
    ],
)
def test_impossible_configs_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        read(family, **changes)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mixtral", "deepseek_v3", "gpt2", "falcon_7b"])
def test_a_tensor_too_few_or_too_many_is_named(family: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    directory = make_family(tmp_path / "model", family)
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in reversed(weights) if "norm" in name or ".ln_" in name)
    save_file({key: value for key, value in weights.items() if key != name}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=f"has no tensor '{name}'"):
        open_model(directory)
    save_file({**weights, "model.layers.0.extra.weight": weights[name]}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.extra\.weight' belongs to no part of a"):
        open_model(directory)


def test_a_config_of_more_layers_than_the_file_has(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "deepseek_v2")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"has no tensor 'model\.layers\.3\."):
        open_model(directory)


@pytest.mark.parametrize("name", ["mamba", "gemma4", "phi3", "bert"])
def test_gguf_architectures_that_are_not_known(name: str) -> None:
    with pytest.raises(ModelError, match=f"architecture '{name}' is not supported; supported are Llama"):
        config_from_gguf({"general.architecture": name}, {})


def test_gguf_files_that_do_not_say_the_groups_of_their_experts() -> None:
    with pytest.raises(ModelError, match=r"160 experts and does not say which groups.*convert it again"):
        config_from_gguf({"general.architecture": "deepseek2", "deepseek2.expert_count": 160}, {})


def test_gpt2_files_without_the_prefix(tmp_path: Path) -> None:
    """As GPT-2 was first published: names without `transformer.`, and with the causal masks."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    directory = make_family(tmp_path / "model", "gpt2")
    whole = open_model(directory)
    weights = {
        key.removeprefix("transformer."): value for key, value in load_file(directory / "model.safetensors").items()
    }
    weights["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    save_file(weights, directory / "model.safetensors")
    assert open_model(directory).config == whole.config
