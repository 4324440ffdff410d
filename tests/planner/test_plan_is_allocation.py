"""Law 2: what the planner says of a model, the engine allocates, to the byte, read from its buffers."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.models.packed_size import WEIGHTS_DTYPES
from octavo.planner.plan import Plan, PlanRequest, make_plan
from octavo.planner.sources import open_geometry
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_models import FAMILIES, make_tiny_model


def plan_of(path: Path, **asked: object) -> Plan:
    return make_plan(open_geometry(str(path)), PlanRequest(**asked))  # type: ignore[arg-type]


def compare(path: Path, llm: LLM, plan: Plan) -> None:
    model = llm.model
    assert plan.is_exact
    assert plan.num_blocks is not None
    assert model.memory.kv_allocated_bytes == plan.num_blocks * plan.pool.bytes_per_block == model.plan.kv_bytes
    assert model.memory.differences() == ()
    assert plan.num_blocks == model.plan.num_blocks
    if all(group.window is None for group in plan.cache.groups):
        assert plan.max_tokens == model.plan.kv_tokens
    assert plan.cache.bytes_per_token == model.plan.spec.bytes_per_token
    assert plan.cache.kv_format == model.kv_cache_dtype
    assert plan.weights_dtype == model.weights_dtype
    # Panels of 16 outputs are planned for each matrix; those that lie on top of each other share the padding.
    assert model.weights_bytes == pytest.approx(plan.weights_bytes, rel=0.06)


@pytest.mark.parametrize("kv_format", ["auto", *FORMAT_BYTES])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_runs_and_every_format(family: str, kv_format: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    scales = "none" if kv_format.startswith("fp8") else None
    step = 1 if kv_format == "auto" else FORMAT_BYTES[kv_format].dim_step
    if plan_of(path).cache.groups[0].head_dim % step:
        with pytest.raises(ConfigError, match=f"multiple of {step}"):
            LLM(str(path), kv_cache_dtype=kv_format, threads=1, kv_cache_scales=scales)
        return
    for block_size, memory in ((16, 1 << 20), (32, 1_000_003), (48, 777_777)):
        plan = plan_of(path, kv_cache_dtype=kv_format, kv_cache_memory=memory, block_size=block_size)
        cache = {"kv_cache_memory": memory, "block_size": block_size, "kv_cache_scales": scales}
        with LLM(str(path), kv_cache_dtype=kv_format, threads=1, **cache) as llm:
            compare(path, llm, plan)


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q4_0", "Q8_0"])
def test_gguf(quantisation: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "llama2", quantisation)
    with LLM(str(path), kv_cache_memory=1 << 20, threads=1) as llm:
        compare(path, llm, plan_of(path, kv_cache_memory=1 << 20))


@pytest.mark.parametrize("weights_dtype", WEIGHTS_DTYPES)
def test_weights_of_every_dtype(weights_dtype: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama2")
    with LLM(str(path), kv_cache_memory=1 << 20, threads=1, weights_dtype=weights_dtype) as llm:
        compare(path, llm, plan_of(path, kv_cache_memory=1 << 20, weights_dtype=weights_dtype))


def test_the_real_model(smollm2_path: Path) -> None:
    """SmolLM2, by its file and by its short name alone: the same cache; weights to the byte by its file."""
    with LLM(str(smollm2_path), kv_cache_memory=64 << 20, threads=1) as llm:
        by_file = plan_of(smollm2_path, kv_cache_memory=64 << 20)
        compare(smollm2_path, llm, by_file)
        by_name = make_plan(open_geometry("smollm2"), PlanRequest(kv_cache_memory=64 << 20))
        assert by_name.num_blocks == by_file.num_blocks
        assert llm.model.weights_bytes == by_file.weights_bytes
