"""Published figures of KV memory against the plan. `make validate DATA=DIR`.

Every row of ground_truth/kv_memory.csv is reproduced within the rounding of its source, or stands in EXEMPT with the
reason why it is no prediction. Known errata must be reproduced as errata: the plan differs from them as it should.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.planner.cache_bytes import CacheBytes
from octavo.planner.comparisons import Comparisons
from octavo.planner.geometry import Geometry
from octavo.planner.lengths import read_lengths
from octavo.planner.plan import Plan, PlanRequest, make_plan
from octavo.planner.pools import Pool, PoolOptions, llamacpp_bytes, make_pool
from octavo.planner.quantisation import weight_bytes
from octavo.planner.sources import Numbers, geometry_of_numbers, open_geometry
from tests.planner.test_config_geometry import transformers_model

pytestmark = pytest.mark.data

GIB, MIB, KIB = 2**30, 2**20, 2**10
EXEMPT = {
    "K02": "a measurement of systems before vLLM: how much of their reserved memory real requests used",
    "K07": "measured memory of processes (weights, activations, graphs); its weights are compared below",
    "K19": "a caution that the ratio of a log moves with max_model_len",
}
V4 = "deepseek-ai/DeepSeek-V4-Flash"


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("OCTAVO_DATA")
    assert folder, "OCTAVO_DATA names the folder of real data; make validate DATA=DIR sets it"
    return Path(folder)


@pytest.fixture(scope="module")
def rows(data: Path) -> dict[str, dict[str, str]]:
    with (data / "ground_truth" / "kv_memory.csv").open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def numbers_in(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def config(data: Path, name: str) -> Geometry:
    (path,) = (data / "configs").glob(f"*/{name}")
    return open_geometry(str(path))


def by_numbers(layers: int, kv_heads: int, head_dim: int) -> Geometry:
    return geometry_of_numbers(Numbers(layers=layers, kv_heads=kv_heads, head_dim=head_dim))


def plan(geometry: Geometry, **asked: object) -> Plan:
    return make_plan(geometry, PlanRequest(**asked))  # type: ignore[arg-type]


def per_token(geometry: Geometry, kv_format: str = "bf16") -> int:
    return int(plan(geometry, kv_cache_dtype=kv_format, engine="vllm").cache.bytes_per_token)


def rounded_like(value: float, published: float) -> bool:
    """Equal to as many digits as were published, rounded or cut."""
    digits = len(f"{published:.10f}".rstrip("0").partition(".")[2])
    return abs(value - published) <= 10**-digits * 0.5000001 or int(value * 10**digits) == round(published * 10**digits)


def k01(data: Path, row: dict[str, str]) -> None:
    opt = config(data, "llm_analysis__facebook_opt-13b.json")
    assert per_token(opt) == 800 * KIB == 2 * 5120 * 40 * 2
    assert rounded_like(plan(opt, context=2048).kv_bytes / GIB, numbers_in(row["published"].split("up to")[1])[0])


def k03(data: Path, row: dict[str, str]) -> None:
    assert per_token(open_geometry("llama-3-70b")) == numbers_in(row["published"])[0] * KIB


def k04(data: Path, row: dict[str, str]) -> None:
    mla, dense = numbers_in(row["published"])
    assert rounded_like(per_token(config(data, "deepseek-ai--DeepSeek-V3_config.json")) / 1000, mla)
    assert rounded_like(per_token(config(data, "maxtext__llama31_405b_config.json")) / 1000, dense)


def k05(data: Path, row: dict[str, str]) -> None:
    tokens = (1024, 16000, 128000)
    names = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "405B": "llama-3.1-405b"}
    for part in row["published"].split(";"):
        name, published = part.split()[0], numbers_in(part)[1:]
        cache = plan(open_geometry(names[name]), kv_cache_dtype="f16").cache
        for count, value in zip(tokens, published, strict=True):
            ours = cache.of(count) / GIB
            if name == "405B":  # the erratum: computed with 16 KV heads
                assert not rounded_like(ours, value)
                assert rounded_like(2 * ours, value)
            else:
                assert rounded_like(ours, value) or abs(ours - value) < 0.002, (name, count, ours, value)


def k06(data: Path, row: dict[str, str]) -> None:
    mistral = by_numbers(40, 8, 128)
    gib, tokens, blocks, size, bytes_each = numbers_in(row["published"])[:5]
    found = plan(mistral, engine="vllm", block_size=int(size), kv_cache_memory=int((gib + 0.005) * GIB), context=16000)
    assert found.cache.bytes_per_token == bytes_each
    low = plan(mistral, engine="vllm", block_size=int(size), kv_cache_memory=int((gib - 0.005) * GIB), context=16000)
    assert low.num_blocks is not None
    assert found.num_blocks is not None
    assert low.num_blocks <= blocks <= found.num_blocks
    assert blocks * size == tokens
    assert found.pool.blocks_for(15049) == 118
    assert rounded_like(100 * 118 / 1444 + 0.0088, 8.18)
    assert rounded_like(tokens / 16000, 11.55)


def k08(data: Path, row: dict[str, str]) -> None:
    found = plan(open_geometry("llama-3.1-8b"), engine="vllm", kv_cache_memory=int(5.055 * GIB))
    assert (found.num_blocks, found.max_tokens) == (2588, 41408)


def k09(data: Path, row: dict[str, str]) -> None:
    llama = open_geometry("llama-3.1-8b")
    for gib, blocks, concurrency, length in ((3.81, 1952, 1.56, 20000), (2.89, 1478, 0.82, 29000)):
        ends = [
            plan(llama, engine="vllm", kv_cache_memory=int((gib + each) * GIB)).num_blocks for each in (-0.005, 0.005)
        ]
        assert ends[0] is not None
        assert ends[1] is not None
        assert ends[0] <= blocks <= ends[1]
        assert rounded_like(blocks * 16 / length, concurrency)
    assert plan(llama, kv_cache_memory=4 * GIB).num_blocks == 2048


def k11(data: Path, row: dict[str, str]) -> None:
    qwen = config(data, "tt-metal__Qwen2.5-7B-Instruct_config.json")
    assert plan(qwen, kv_cache_memory=4 * GIB).num_blocks == numbers_in(row["published"])[0]


def k13(data: Path, row: dict[str, str]) -> None:
    each = per_token(config(data, "Qwen--Qwen3-30B-A3B-FP8_config.json"), "fp8")
    first, second, third = row["published"].split(";")
    for part in (first, third):
        gib, tokens = numbers_in(part)
        assert rounded_like(tokens * each / GIB, gib)
    tokens, gib = numbers_in(second)
    assert rounded_like(tokens * each / GIB, gib)


def k16(data: Path, row: dict[str, str]) -> None:
    for blocks, concurrency in ((1381, 10.79), (127626, 997.08)):
        pool = plan(open_geometry("llama-3.1-8b"), engine="vllm").pool
        assert rounded_like(pool.sequences(blocks, 2048), concurrency)
    assert pool.tokens(127626) == 2042016


def hybrid_pool(geometry: Geometry, longest: int, *, ranks: int = 1, keeps_states: bool = False) -> Pool:
    kv_format = "fp8" if geometry.family == "deepseek_v4" else "bf16"
    found = plan(geometry, engine="vllm", kv_cache_dtype=kv_format, ranks=(ranks, 1))
    options = PoolOptions(kv_format, "bf16", 16, longest, keeps_states=keeps_states)
    return make_pool("vllm", found.rank_cache.groups, options)


def k17(data: Path, row: dict[str, str]) -> None:
    """The log was wrong: it divided the blocks by the tables and forgot that states need one block only."""
    logged, concurrency, longest = numbers_in(row["published"])
    pool = hybrid_pool(config(data, "nvidia--Qwen3.6-27B-NVFP4_config.json"), int(longest))
    blocks = 1487
    assert rounded_like(pool.sequences(blocks, int(longest)), concurrency)
    assert blocks // pool.num_tables * pool.block_size == logged
    assert pool.tokens(blocks) > 3.7 * logged
    assert abs(pool.tokens(blocks) - numbers_in(row["recomputed_here"])[0]) < 0.005 * longest


def k18(data: Path, row: dict[str, str]) -> None:
    """Windows counted as full layers give ten times too few tokens."""
    gemma = config(data, "nvidia--Gemma-4-31B-IT-NVFP4_config.json")
    all_full, aware = numbers_in(row["published"])[0], numbers_in(row["published"].split("versus")[1])[0]
    assert (all_full, aware) == (55, 525)
    groups = tuple(replace(group, window=None, kind="full", name="full") for group in gemma.groups)
    flat = CacheBytes(groups, "bf16", "bf16")
    assert round(50e9 / flat.bytes_per_token / 1000) == all_full
    pool = hybrid_pool(gemma, gemma.max_context)
    assert pool.tokens(pool.num_blocks(int(50e9))) / 1000 == pytest.approx(aware, rel=0.05)  # "~50 GB", "~525k"


def k20(data: Path, row: dict[str, str]) -> None:
    models = {
        "Mixtral-8x7B": config(data, "LLMServingSim__mistralai--Mixtral-8x7B-v0.1_config.json"),
        "Llama-3-8B": open_geometry("llama-3-8b"),
        "Llama-3-70B": open_geometry("llama-3-70b"),
        "Qwen1.5-32B": by_numbers(64, 8, 128),
        "Yi-1.5-34B": by_numbers(60, 8, 128),
        "functionary-small-v2.4": by_numbers(32, 8, 128),
        "Command-R-35B": by_numbers(40, 64, 128),
    }
    for part in row["published"].split(";"):
        name, mib = part.rsplit(maxsplit=1)
        assert llamacpp(models[name.strip()], 2048) == float(mib) * MIB


def llamacpp(geometry: Geometry, context: int, kv_format: str = "f16") -> int:
    return llamacpp_bytes(geometry.groups, PoolOptions(kv_format, geometry.dtype, 1, context), context, 1)


def k22(data: Path, row: dict[str, str]) -> None:
    assert llamacpp(by_numbers(64, 8, 128), 32768, "q8_0") == numbers_in(row["published"])[0] * MIB


def k23(data: Path, row: dict[str, str]) -> None:
    qwen = config(data, "tt-metal__Qwen2.5-7B-Instruct_config.json")
    assert llamacpp(qwen, 2048) == numbers_in(row["published"])[0] * MIB


def k25(data: Path, row: dict[str, str]) -> None:
    llama = config(data, "llm_analysis__NousResearch_Llama-2-7b-hf.json")
    assert round(plan(llama, context=10000).kv_bytes / 1e9) == numbers_in(row["published"])[0]


def k28(data: Path, row: dict[str, str]) -> None:
    """TensorRT-LLM rounds the number of blocks up."""
    qwen = by_numbers(32, 32, 128)
    found = plan(qwen, engine="vllm", block_size=64, kv_cache_memory=int(21.89 * GIB * 0.9))
    assert found.num_blocks is not None
    assert found.num_blocks + 1 == numbers_in(row["published"])[0]


def k29(data: Path, row: dict[str, str]) -> None:
    jamba, mixtral = numbers_in(row["published"])
    assert plan(by_numbers(4, 8, 128), context=256 * KIB).kv_bytes == jamba * GIB
    assert plan(open_geometry("mixtral-8x7b"), context=256 * KIB).kv_bytes == mixtral * GIB


def k30(data: Path, row: dict[str, str]) -> None:
    """Its rows are the startup logs, each checked below."""
    qwen = config(data, "Qwen--Qwen3-32B_config.json")
    assert [int(plan(qwen, ranks=(ranks, 1)).rank_cache.bytes_per_token) for ranks in (1, 2, 4, 8)] == [
        262144 // ranks for ranks in (1, 2, 4, 8)
    ]
    hybrid = config(data, "nvidia--Qwen3.6-35B-A3B-NVFP4_config.json")
    assert per_token(hybrid) == 20480


def k32(data: Path, row: dict[str, str]) -> None:
    """24 layers of the geometry of Qwen3.6's linear layers; both parts are in f32 there."""
    geometry = config(data, "nvidia--Qwen3.6-35B-A3B-NVFP4_config.json")
    (state,) = (replace(group, layer_indices=tuple(range(24))) for group in geometry.groups if group.kind == "state")
    conv, recurrent, both = numbers_in(row["published"])
    assert 24 * state.conv_numbers * 4 == conv * MIB
    assert 24 * state.state_numbers * 4 == recurrent * MIB
    assert llamacpp_bytes((state,), PoolOptions("f16", "bf16", 1, 4096), 4096, 1) == both * MIB


def k36(data: Path, row: dict[str, str]) -> None:
    deepseek = config(data, "deepseek-ai--DeepSeek-V3.2_config.json")
    assert rounded_like(llamacpp(deepseek, 160 * KIB) / GIB, numbers_in(row["published"])[0])


CHECKS: dict[str, Callable[[Path, dict[str, str]], None]] = {
    check.__name__.upper(): check
    for check in (
        k01, k03, k04, k05, k06, k08, k09, k11, k13, k16, k17, k18, k20, k22, k23, k25, k28, k29, k30, k32, k36,
    )
}  # fmt: skip


def test_every_row_is_checked_or_exempt(rows: dict[str, dict[str, str]]) -> None:
    assert set(rows) == set(CHECKS) | set(EXEMPT)
    assert not set(CHECKS) & set(EXEMPT)


@pytest.mark.parametrize("name", CHECKS)
def test_published_memory(name: str, data: Path, rows: dict[str, dict[str, str]]) -> None:
    CHECKS[name](data, rows[name])


def test_weights_of_the_measured_processes(data: Path, rows: dict[str, dict[str, str]]) -> None:
    """K07: what vLLM says it loaded is at most 2% more than the plan; kernels of gpt-oss pad its experts to 128."""
    models = {
        "Llama-3.1-8B": (open_geometry("llama-3.1-8b"), 1, 0.01),
        "Qwen3-0.6B": (config(data, "Qwen--Qwen3-0.6B_config.json"), 1, 0.01),
        "Qwen3-32B TP1": (config(data, "Qwen--Qwen3-32B_config.json"), 1, 0.01),
        "Qwen3-32B TP2": (config(data, "Qwen--Qwen3-32B_config.json"), 2, 0.01),
        "Llama-3.3-70B-FP8 TP2": (config(data, "nvidia--Llama-3.1-70B-Instruct-FP8_config.json"), 2, 0.01),
        "gpt-oss-20b": (config(data, "openai--gpt-oss-20b_config.json"), 1, 0.07),
        "gpt-oss-120b": (config(data, "openai--gpt-oss-120b_config.json"), 1, 0.07),
    }
    published = {part.rsplit(maxsplit=1)[0].strip(): part.split()[-1] for part in rows["K07"]["published"].split(";")}
    for name, (geometry, ranks, most) in models.items():
        loaded = float(published[name].split("/")[0]) * GIB
        ours = weight_bytes(geometry) / ranks
        assert -0.005 < loaded / ours - 1 < most, (name, loaded / ours)


def startup_rows(data: Path) -> list[dict[str, str]]:
    with (data / "ground_truth" / "vllm_startup_kv_logs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ranks_of(bytes_per_token: float, at_one_rank: int) -> int:
    """The logs do not name the ranks; the nearest power of two, by what a token takes."""
    return min((1, 2, 4, 8), key=lambda ranks: abs(bytes_per_token - at_one_rank / ranks))


def test_tokens_of_startup_logs(data: Path) -> None:
    """From the memory that a log names (to 0.01 GiB) to its tokens and its concurrency."""
    configs = {
        "Qwen/Qwen3-32B": config(data, "Qwen--Qwen3-32B_config.json"),
        "Qwen/Qwen3.6-35B-A3B": config(data, "nvidia--Qwen3.6-35B-A3B-NVFP4_config.json"),
        V4: config(data, "deepseek-ai--DeepSeek-V4-Flash_config.json"),
    }
    checked = 0
    for row in startup_rows(data):
        geometry, longest = configs[row["model"]], int(row["max_model_len"])
        block_size = int(row["block_size"])
        if row["model"] == V4:
            ranks = 1  # every rank keeps the latents whole
        elif row["model"] == "Qwen/Qwen3-32B":
            ranks = ranks_of(float(row["derived_bytes_per_token"]), 262144)
        else:  # 2 KV heads: above two ranks the heads are copied and the states are still split
            ranks = {272: 8, 528: 4}.get(block_size, ranks_of(float(row["derived_bytes_per_token"]), 20790))
        pool = hybrid_pool(geometry, longest, ranks=ranks, keeps_states=row["mamba_cache_mode"] == "align")
        assert pool.block_size == (256 if row["model"] == V4 else block_size)
        ends = [pool.num_blocks(int((float(row["available_kv_GiB"]) + each) * GIB)) for each in (-0.005, 0.005)]
        tokens = int(row["gpu_kv_cache_tokens"])
        assert pool.tokens(ends[0]) <= tokens <= pool.tokens(ends[1]), row
        least, most = (pool.sequences(blocks, longest) for blocks in ends)
        assert least - 0.005 <= float(row["max_concurrency_x"]) <= most + 0.005, row
        checked += 1
    assert checked == 67


def test_what_deepseek_v4_keeps_stays_below_what_is_allocated(data: Path) -> None:
    geometry = config(data, "deepseek-ai--DeepSeek-V4-Flash_config.json")
    kept = CacheBytes(geometry.groups, "fp8", "bf16").of(1 << 20) / (1 << 20)
    found = [row for row in startup_rows(data) if row["model"] == V4]
    assert len(found) == 19
    for row in found:
        assert 1.2 < float(row["derived_bytes_per_token"]) / kept < 1.5


def test_every_config_parses(data: Path) -> None:
    paths = [path for path in sorted((data / "configs").glob("*/*.json")) if "hf_quant" not in path.name]
    assert len(paths) >= 160
    for path in paths:
        geometry = open_geometry(str(path))
        found = plan(geometry, engine="vllm")
        assert found.kv_bytes > 0
        assert geometry.parameters > 10**8
        assert weight_bytes(geometry) > 10**8


def test_companions_are_merged(data: Path) -> None:
    for path in sorted((data / "configs" / "verbatim").glob("*_hf_quant_config.json")):
        base = path.with_name(path.name.replace("_hf_quant_config.json", "_config.json"))
        if base.exists():
            assert open_geometry(str(base)).quantisation is not None, base.name


def test_reserving_the_longest_leaves_most_of_it_empty(data: Path) -> None:
    """As the PagedAttention paper measured of others (20.4% to 38.2%), by the lengths of real conversations."""
    lengths = read_lengths(data / "lengths" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz")
    found = Comparisons(plan(open_geometry("llama-2-7b")), lengths=lengths).contiguous()
    assert found["contiguous_used_share"] == pytest.approx(0.341, abs=0.0005)
    assert found["paged_used_share"] == pytest.approx(0.997, abs=0.0005)
    assert (found["sequences"], found["reserved_tokens_each"]) == (30_731, 8_149)


FAMILIES_CHECKED_HERE = {
    "neuronx__configs__16x13b_config.json": "dbrx",
    "ipex_test__mllama_config.json": "mllama",
    "XiaomiMiMo--MiMo-V2-Flash_config.json": "mimo_v2_flash",
    "deepseek-ai--DeepSeek-V3.2_config.json": "deepseek_v32",
    "zai-org--GLM-5.2-FP8_config.json": "deepseek_v32",
    "deepseek-ai--DeepSeek-V4-Flash_config.json": "deepseek_v4",
    "MiniMaxAI--MiniMax-M3_config.json": "minimax_m3",
    "google--gemma-4-26B-A4B_config.json": "gemma4",
    "nvidia--Gemma-4-31B-IT-NVFP4_config.json": "gemma4",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8_config.json": "nemotron_h",
    "openai--gpt-oss-20b_config.json": "gpt_oss",
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json": "llama4",
}


@pytest.mark.parametrize("name", FAMILIES_CHECKED_HERE)
def test_parameters_of_real_models_are_those_of_transformers(name: str, data: Path) -> None:
    """Families for which a small config would show little; models on torch's meta device."""
    import json

    (path,) = (data / "configs").glob(f"*/{name}")
    values = json.loads(path.read_text())
    geometry = open_geometry(str(path))
    assert geometry.family == FAMILIES_CHECKED_HERE[name]
    text = values.get("text_config", values)
    kind = {"minimax_m3": "minimax_m3_vl_text"}.get(text["model_type"], text["model_type"])
    text = {key: value for key, value in text.items() if key not in ("quantization_config", "model_type", "auto_map")}
    theirs = sum(parameter.numel() for parameter in transformers_model(kind, text).parameters())
    assert geometry.parameters == theirs
