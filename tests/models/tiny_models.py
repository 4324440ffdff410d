"""Tiny random models of every family, written as a user would have them: config.json, safetensors, tokenizer, template.

Only numpy and tokenizers are needed, no torch. The weights are random but large enough that greedy text varies.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

F32 = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_LINES = (
    "The quick brown fox jumps over the lazy dog near the river bank in the morning.",
    "A cache keeps what was computed, so that the same words need not be read twice.",
    "user system assistant: please tell me a short story about a small blue house.",
    "Numbers such as 1, 22, 333 and 4,096 are split into digits; été, naïve, 你好 and emoji 🙂 are bytes.",
    "def add(left, right):\n    return left + right\n",
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

# family -> what its config.json says on top of the common part
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_LLAMA},
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_linear_rope": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama_bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_wide_heads": {**_LLAMA, "head_dim": 32},
    "llama_mha": {**_LLAMA, "num_key_value_heads": 4},
    "smollm2": {
        **_LLAMA,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral_window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 3,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a family, with fields replaced; a head_dim of None is left out, as real files do."""
    config = {**_COMMON, **FAMILIES[family], **overrides}
    config.setdefault("vocab_size", tiny_tokenizer().get_vocab_size())
    if config["head_dim"] is None:
        del config["head_dim"]
    return config


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few hundred tokens; ids 0 to 2 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=336,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_LINES, trainer)
    return tokenizer


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, F32]:
    """Random weights under their Hugging Face names, in float32."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    is_qwen2 = config["model_type"] == "qwen2"
    qkv_bias = is_qwen2 or config.get("attention_bias", False)
    output_bias = not is_qwen2 and config.get("attention_bias", False)

    def matrix(num_outputs: int, num_inputs: int) -> F32:
        return (rng.standard_normal((num_outputs, num_inputs)) / np.sqrt(num_inputs)).astype(np.float32)

    def near(center: float, size: int) -> F32:
        return (center + 0.1 * rng.standard_normal(size)).astype(np.float32)

    # Tied rows that were large would make every token predict itself.
    embedding = rng.standard_normal((config["vocab_size"], hidden)) * (0.2 if config["tie_word_embeddings"] else 1.0)
    weights = {"model.embed_tokens.weight": embedding.astype(np.float32)}
    for index in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, heads * head_dim, output_bias),
            "mlp.gate_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.up_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.down_proj": (hidden, inner, config.get("mlp_bias", False)),
        }
        prefix = f"model.layers.{index}."
        weights[prefix + "input_layernorm.weight"] = near(1.0, hidden)
        weights[prefix + "post_attention_layernorm.weight"] = near(1.0, hidden)
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            weights[prefix + name + ".weight"] = matrix(num_outputs, num_inputs)
            if has_bias:
                weights[prefix + name + ".bias"] = near(0.0, num_outputs)
        if config["model_type"] == "qwen3":
            weights[prefix + "self_attn.q_norm.weight"] = near(1.0, head_dim)
            weights[prefix + "self_attn.k_norm.weight"] = near(1.0, head_dim)
    weights["model.norm.weight"] = near(1.0, hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def to_stored(x: F32, dtype: str) -> tuple[str, bytes]:
    """The dtype's name in safetensors, and the little-endian bytes of x in it ("f32", "f16" or "bf16")."""
    if dtype == "f32":
        return "F32", x.astype("<f4").tobytes()
    if dtype == "f16":
        return "F16", x.astype("<f2").tobytes()
    assert dtype == "bf16", dtype
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    return "BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_safetensors(path: Path, tensors: dict[str, F32], dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, x in tensors.items():
        stored_name, raw = to_stored(x, dtype)
        header[name] = {"dtype": stored_name, "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def write_shards(directory: Path, weights: dict[str, F32], dtype: str, num_shards: int) -> None:
    """One model.safetensors, or several shards with their index."""
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return
    names = list(weights)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        write_safetensors(directory / file_name, {name: weights[name] for name in part}, dtype)
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json with a chat template, and generation_config.json."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_turn,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [2, 0]}))


def make_tiny_model(
    path: Path, family: str = "llama2", *, dtype: str = "f32", num_shards: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """Write a tiny random model of a family into the directory `path` (made if need be), and return it.

    dtype is "f32", "f16" or "bf16"; every other keyword replaces a field of config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": names[dtype]}, indent=2))
    write_shards(path, tiny_weights(config, seed), dtype, num_shards)
    write_tokenizer(path)
    return path
