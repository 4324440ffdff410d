"""Tiny random models of the families beyond Llama, made and saved by transformers: its files are what users have.

The weights are random but large enough that greedy text varies, and norms, biases and sinks are never at their start
values, so that one that is left out shows.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.models.tiny_models import write_tokenizer

VOCAB_SIZE = 336  # of tiny_tokenizer
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

_DEEPSEEK: dict[str, Any] = {
    **{name: value for name, value in _WIDE.items() if name not in ("num_key_value_heads", "head_dim")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

# family -> fields of its config; windows are shorter than the tests' texts, and no multiple of a block
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **_WIDE},
    "gemma2": {
        "model_type": "gemma2",
        **_WIDE,
        "num_hidden_layers": 4,
        "sliding_window": 21,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_WIDE,
        "num_hidden_layers": 6,
        "sliding_window": 21,
        "query_pre_attn_scalar": 24,
    },
    "gemma3_rope": {
        "model_type": "gemma3_text",
        **_WIDE,
        "num_hidden_layers": 4,
        "sliding_window": 33,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
        "final_logit_softcapping": 5.0,
    },
    "mistral_window": {"model_type": "mistral", **_WIDE, "sliding_window": 21},
    "llama_yarn": {
        "model_type": "llama",
        **_WIDE,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
        },
    },
    "gpt2": {"model_type": "gpt2", **_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt2_untied": {
        "model_type": "gpt2",
        **_COMMON,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 3,
        "n_inner": 80,
        "n_positions": 256,
        "tie_word_embeddings": False,
        "activation_function": "relu",
    },
    "bigcode": {"model_type": "gpt_bigcode", **_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "opt": {
        "model_type": "opt",
        **_COMMON,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "falcon_7b": {
        "model_type": "falcon",
        **_COMMON,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "falcon_40b": {
        "model_type": "falcon",
        **_COMMON,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_WIDE,
        "sliding_window": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_WIDE,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_moe_dense": {
        "model_type": "qwen3_moe",
        **_WIDE,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_WIDE,
        "num_hidden_layers": 4,
        "sliding_window": 21,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "max_position_embeddings": 512,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.9,
        },
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": None,
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "qwen2_window": {
        "model_type": "qwen2",
        **{name: value for name, value in _WIDE.items() if name != "head_dim"},
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 2,
    },
}


@functools.cache
def _saved(family: str, seed: int, changes: str) -> Path:
    """The directory of a model, made once and kept to the end of the process."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    fields = {**FAMILIES[family], **json.loads(changes)}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            randomise(name, values, tied=config.tie_word_embeddings)
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="octavo-families-"))
    path = Path(_FOLDERS[-1].name)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(path)
    return path


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed at the end of the process


def randomise(name: str, values: Any, *, tied: bool) -> None:
    """In place, a torch tensor: matrices of about 1 / sqrt(inputs), vectors around what they start from."""
    if not values.is_floating_point() or "inv_freq" in name:
        return
    if values.ndim >= 2:
        is_vocabulary = any(word in name for word in ("embed_tokens", "wte", "word_embeddings"))
        size = (0.2 if tied else 1.0) if is_vocabulary else values.shape[-1] ** -0.5
        values.normal_(0.0, size)
    else:
        values.add_(values.new_empty(values.shape).normal_(0.0, 0.1))


def make_family(path: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random model of a family into `path`, which must not exist, and return it."""
    shutil.copytree(_saved(family, seed, json.dumps(changes, sort_keys=True)), path)
    return path
