"""int4 for a whole model: its bytes to the byte of the plan, what is said of it, and what it is refused with."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPT = [n * 7 % 300 + 3 for n in range(70)]
TOKEN_BYTES = (
    3 * 2 * (6 * 32 // 8 + 4 * 32 // 8 + 4)
)  # layers x KV heads x (K, V, scale and minimum of V) of 32 numbers


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("wide"), "llama_wide_heads", dtype="bf16")


def test_what_is_planned_is_allocated_and_said(wide: Path) -> None:
    with LLM(str(wide), kv_cache_dtype="int4", kv_cache_memory=1 << 20, max_num_batched_tokens=64, threads=1) as llm:
        model, spec = llm.model, llm.model.plan.spec
        assert model.kv_cache_dtype == "int4"
        assert spec.bytes_per_token == TOKEN_BYTES
        assert spec.bytes_per_block == 16 * TOKEN_BYTES
        assert (
            model.memory.kv_allocated_bytes
            == model.plan.kv_bytes
            == (1 << 20) // spec.bytes_per_block * 16 * TOKEN_BYTES
        )
        tails = [group for group in spec.groups if group.kind == "tail"]
        assert f"in {len(spec.groups)} KV groups, {len(tails)} for blocks that fill" in str(model.plan)
        assert sum(len(group.layer_indices) for group in tails) == 3
        assert model.degraded == ()
        (cold,), (warm,) = llm.generate(PROMPT, GREEDY), llm.generate(PROMPT, GREEDY)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 69)
        assert cold.token_ids == warm.token_ids
        core = model.core.status()
        assert (core.used_blocks, core.free_blocks + core.cached_blocks) == (0, core.num_blocks)


def test_layers_can_be_left_out_of_it(wide: Path) -> None:
    options = {"kv_cache_memory": 1 << 20, "threads": 1}
    with LLM(str(wide), kv_cache_dtype="int4", kv_cache_skip_layers=(0, 1, 2), **options) as llm:
        assert llm.model.kv_cache_dtype == "bf16"
        assert [group.kind for group in llm.model.plan.spec.groups] == ["pair"]
        (without,) = llm.generate(PROMPT, GREEDY)
    with LLM(str(wide), **options) as llm:
        (plain,) = llm.generate(PROMPT, GREEDY)
    assert without.token_ids == plain.token_ids
    with LLM(str(wide), kv_cache_dtype="int4", kv_cache_skip_layers=(0,), **options) as llm:
        assert llm.model.kv_cache_dtype == "int4 (bf16 in layers 0)"
        tails = [group for group in llm.model.plan.spec.groups if group.kind == "tail"]
        assert sorted(index for group in tails for index in group.layer_indices) == [1, 2]
        (cold,), (warm,) = llm.generate(PROMPT, GREEDY), llm.generate(PROMPT, GREEDY)
        assert cold.token_ids == warm.token_ids


def test_what_it_cannot_be_combined_with_is_refused_by_name(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantises keys by whole tiles \(KV format int4\); take kv_policy all"):
        LLM(str(wide), kv_cache_dtype="int4", kv_policy="streaming:4,20,16", threads=1)
    with pytest.raises(ConfigError, match="this model's latents are both; choose int8"):
        LLM(str(make_family(tmp_path / "latent", "deepseek_v2")), kv_cache_dtype="int4", threads=1)
    with pytest.raises(ConfigError, match="multiple of 32 numbers"):
        LLM(str(make_tiny_model(tmp_path, "llama2")), kv_cache_dtype="int4", threads=1)
