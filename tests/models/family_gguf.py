"""Tiny GGUF files of the families beyond Llama, made from the directories of `tiny_families`.

Tensors get the names that the gguf package has for them, and the changes that converters make: norms of Gemma plus 1,
matrices of GPT-2 turned, rows of Mixtral's q and k interleaved, experts stacked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants
from safetensors.numpy import load_file

from tests.models.tiny_gguf import add_tokenizer, interleave
from tests.models.tiny_models import F32

# model_type -> architecture of GGUF
ARCHITECTURES = {
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
_EXPERT = re.compile(r"(.*\.)(block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")


def make_family_gguf(path: Path, directory: Path, quantisation: str = "F32", *, splits_latent: bool = True) -> None:
    """Write `directory`'s model as one GGUF file; quantisation is that of matrices whose rows are whole blocks.

    splits_latent: DeepSeek's matrices of K and V apart, as newer converters have them.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_config(writer, config)
    add_tokenizer(writer, config)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, layers)
    weights = converted(load_file(directory / "model.safetensors"), config)
    if splits_latent and config["model_type"].startswith("deepseek"):
        weights = dict(pair for name, values in weights.items() for pair in _split_latent(name, values, config))
    for name, values in weights.items():
        found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        kind = gguf.GGMLQuantizationType[quantisation]
        if values.ndim < 2 or "gate_inp" in found or "position" in found or values.shape[-1] % 32 or kind == 0:
            writer.add_tensor(found, np.ascontiguousarray(values))
        else:
            writer.add_tensor(found, quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(weights: dict[str, F32], config: dict[str, Any]) -> dict[str, F32]:
    """Tensors as converters change them, under names that the gguf package knows."""
    kind, found = config["model_type"], dict[str, F32]()
    stacks: dict[str, dict[int, F32]] = {}
    for name, values in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stem, block, index, word = expert.groups()
            key = f"{stem}{block}.experts.{word}.weight"
            stacks.setdefault(_stacked_name(key), {})[int(index)] = values
        elif kind.startswith("gemma") and name.endswith("norm.weight"):
            found[name] = values + 1
        elif kind == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
            found[name] = values.T
        elif kind == "falcon" and "query_key_value" in name:
            found[name] = _falcon_rows(values, config)
        elif kind == "mixtral" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            found[name] = interleave(values, heads)
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = values
        elif kind == "gpt_oss" and ".experts." in name:
            found |= _gpt_oss_experts(name, values)
        elif kind == "gpt_oss" and name.endswith(".sinks"):
            found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = values
        else:
            found[name] = values
    found |= {name: np.stack([of[index] for index in sorted(of)]) for name, of in stacks.items()}
    return found


def _stacked_name(name: str) -> str:
    layer = name.split(".")[2]
    word = {"w1": "gate", "w3": "up", "w2": "down"}.get(name.split(".")[-2], name.split(".")[-2].split("_")[0])
    return f"blk.{layer}.ffn_{word}_exps.weight"


def _gpt_oss_experts(name: str, values: F32) -> dict[str, F32]:
    stem, end = f"blk.{name.split('.')[2]}.ffn_", "bias" if name.endswith("_bias") else "weight"
    if end == "weight":
        values = values.swapaxes(1, 2)  # [num_experts, outputs, inputs]
    if "gate_up" not in name:
        return {f"{stem}down_exps.{end}": values}
    return {f"{stem}gate_exps.{end}": values[:, 0::2], f"{stem}up_exps.{end}": values[:, 1::2]}


def _split_latent(name: str, values: F32, config: dict[str, Any]) -> list[tuple[str, F32]]:
    if ".kv_b_proj." not in name:
        return [(name, values)]
    plain, stem = config["qk_nope_head_dim"], f"blk.{name.split('.')[2]}.attn_"
    heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    return [(f"{stem}k_b.weight", heads[:, :plain].swapaxes(1, 2)), (f"{stem}v_b.weight", heads[:, plain:])]


def _falcon_rows(values: F32, config: dict[str, Any]) -> F32:
    """q of all heads, then k, then v."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    groups = values.reshape(kv_heads, heads // kv_heads + 2, size // heads, *values.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    writer.add_name("tiny")
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    writer.add_feed_forward_length(inner)
    if config["model_type"] in ("gpt2", "gpt_bigcode", "falcon"):
        writer.add_head_count_kv(heads if config["model_type"] == "gpt2" else config.get("num_kv_heads") or 1)
        if config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
            writer.add_head_count_kv(1)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "kv_lora_rank" in config:
        _add_latent(writer, config)
    else:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or inner)


def _add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope, is_v3 = config["kv_lora_rank"], config["qk_rope_head_dim"], config["model_type"] == "deepseek_v3"
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(is_v3)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
