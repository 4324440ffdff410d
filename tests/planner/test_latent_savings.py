"""What DeepSeek-V2's latents save, by octavo's own bytes: each published ratio with what it is a ratio to."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.planner.plan import PlanRequest, make_plan
from octavo.planner.sources import open_geometry

DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 3,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}


def plain(num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 102400,
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def bytes_per_token(folder: Path, config: dict[str, Any]) -> Fraction:
    """In bf16."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Fraction(make_plan(open_geometry(str(folder)), PlanRequest()).cache.bytes_per_token)


def test_the_published_ratios_and_their_bases(tmp_path: Path) -> None:
    latent = bytes_per_token(tmp_path / "v2", DEEPSEEK_V2)
    of_67b = bytes_per_token(tmp_path / "67b", plain(95, 64, 8))  # DeepSeek-67B
    of_heads = bytes_per_token(tmp_path / "heads", plain(60, 128, 128))  # the same layers with all heads
    assert (latent, of_67b, of_heads) == (69_120, 389_120, 3_932_160)
    assert float(1 - latent / of_67b) == pytest.approx(0.822, abs=5e-4), "at equal precision"
    assert float(1 - latent * Fraction(6, 16) / of_67b) == pytest.approx(0.933, abs=5e-4), "6 bits against 16"
    assert float(1 - latent / of_heads) == pytest.approx(0.982, abs=5e-4), "against 128 heads of 128"


def test_the_engine_takes_the_same_bytes() -> None:
    spec = KVSpec((KVGroupSpec("latents", tuple(range(60)), 1, 512 + 64, "bf16", kind="latent"),), 16)
    assert spec.bytes_per_token == 69_120
    spec = KVSpec((KVGroupSpec("67b", tuple(range(95)), 8, 128, "bf16"),), 16)
    assert spec.bytes_per_token == 389_120


def test_the_document_says_what_is_computed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "seed-numbers.md").read_text()
    for words in ("82.2%", "93.3%", "98.2%", "69,120 bytes", "389,120 bytes", "3,932,160 bytes"):
        assert words in text
