"""Tiny GGUF files of every quantisation, with the float32 weights that they stand for.

The weights are those of `tiny_models`, quantised; K-quants, which the gguf package reads and cannot make, get random
blocks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from tests.models.tiny_models import CHAT_TEMPLATE, F32, tiny_config, tiny_tokenizer, tiny_weights

QUANTISATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Rows of a K-quant have a multiple of 256 numbers.
WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}

_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, ending = name.rsplit(".", 1)
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{ending}"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{ending}"


def make_tiny_gguf(
    path: Path, family: str = "llama2", quantisation: str = "F32", *, seed: int = 0, version: int = 3, **overrides: Any
) -> dict[str, F32]:
    """Write a GGUF file; return its dequantised weights, names and order of rows as in Hugging Face's files."""
    config = tiny_config(family, **{**WIDE, **overrides})
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, architecture)
    add_tokenizer(writer, config)
    rng = np.random.default_rng(seed)
    meaning = {}
    for name, values in tiny_weights(config, seed).items():
        heads = _heads(name, config) if architecture == "llama" else 0
        stored = interleave(values, heads) if heads else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
            meaning[name] = values
            continue
        kind = gguf.GGMLQuantizationType[quantisation]
        is_random = quantisation.endswith("_K")
        raw = _random_blocks(rng, values.shape, quantisation) if is_random else quants.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        values = quants.dequantize(raw, kind)
        meaning[name] = _separate(values, heads) if heads else values
    if config["rope_scaling"] and config["rope_scaling"].get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if version != 3:
        raw_file = bytearray(path.read_bytes())
        raw_file[4:8] = version.to_bytes(4, "little")
        path.write_bytes(raw_file)
    return meaning


def _random_blocks(rng: np.random.Generator, shape: tuple[int, ...], quantisation: str) -> npt.NDArray[np.uint8]:
    """Blocks of random bits with scales that make weights of about 1 / sqrt(number of inputs)."""
    kind = gguf.GGMLQuantizationType[quantisation]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, num_bytes), np.uint8)
    size = 1 / math.sqrt(shape[1])
    where, scales = {
        "Q4_K": (slice(0, 4), [size / 250, size / 33]),  # scale of the scales, scale of the minima
        "Q5_K": (slice(0, 4), [size / 500, size / 33]),
        "Q6_K": (slice(208, 210), [size / 1200]),
    }[quantisation]
    blocks[..., where] = np.array(scales, "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _heads(name: str, config: dict[str, Any]) -> int:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def interleave(values: F32, heads: int) -> F32:
    """Rows j and j + head_dim / 2 of a head become rows 2j and 2j + 1, as converters for llama do."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _separate(values: F32, heads: int) -> F32:
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config["rope_scaling"] or {}
    if scaling.get("type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_array("test.numbers", list(range(100)))


def add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _llama3_divisors(config: dict[str, Any]) -> F32:
    """What converters store as rope_freqs.weight for Llama 3: by how much each frequency is divided."""
    scaling, head_dim = config["rope_scaling"], config["head_dim"]
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    divisors = []
    for dimension in range(0, head_dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (dimension / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            blend = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)
