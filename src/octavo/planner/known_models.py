"""Models that can be planned by a short name, with nothing at hand but this table. Facts only, from their configs.

The aliases of the model cache are among them, so that their plan needs no download.
"""

from __future__ import annotations

from collections.abc import Mapping

Config = Mapping[str, object]

# family, layers, hidden size, heads, KV heads, MLP width, vocabulary, longest context
_ROWS: dict[str, tuple[str, int, int, int, int, int, int, int]] = {
    "llama-2-7b": ("llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": ("llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": ("llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": ("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": ("llama", 80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": ("llama", 32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": ("llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": ("llama", 126, 16384, 128, 8, 53248, 128256, 131072),
    "mistral-7b": ("mistral", 32, 4096, 32, 8, 14336, 32000, 32768),
    "mixtral-8x7b": ("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768),
    "opt-13b": ("opt", 40, 5120, 40, 40, 20480, 50272, 2048),
    "qwen2.5-7b": ("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768),
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960),
    "qwen3-32b": ("qwen3", 64, 5120, 64, 8, 25600, 151936, 40960),
    "smollm2": ("llama", 30, 576, 9, 3, 1536, 49152, 8192),
    "gemma3-270m": ("gemma3", 18, 640, 4, 1, 2048, 262144, 32768),
}
_MORE: dict[str, Config] = {
    "llama-2-7b": {"torch_dtype": "float16"},
    "llama-2-13b": {"torch_dtype": "float16"},
    "llama-2-70b": {"torch_dtype": "float16"},
    "opt-13b": {"torch_dtype": "float16"},
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-8b": {"head_dim": 128},
    "qwen3-32b": {"head_dim": 128},
    "smollm2": {"tie_word_embeddings": True},
    "gemma3-270m": {"head_dim": 256, "sliding_window": 512},
}


def known_config(name: str) -> Config | None:
    """The config behind a short name; None where there is none of that name."""
    row = _ROWS.get(name.lower())
    if row is None:
        return None
    family, layers, hidden, heads, kv_heads, width, vocab, context = row
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **_MORE.get(name.lower(), {}),
    }


def known_names() -> tuple[str, ...]:
    return tuple(_ROWS)
