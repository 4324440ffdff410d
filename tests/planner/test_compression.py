"""Ways to a smaller cache: bytes as the engine allocates them, and advice that follows from what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec
from octavo.core.streaming import StreamingLLM
from octavo.errors import ConfigError
from octavo.planner.compression import ALL_TOKENS, AS_TRAINED, Comparison, compare, is_offered
from octavo.planner.compression_advice import SCENARIOS, advise
from octavo.planner.compression_quality import Measured, known_evidence, of_certificate
from octavo.planner.compression_report import Compression, compression_json, compression_text
from octavo.planner.config_geometry import geometry_of
from octavo.planner.plan import PlanRequest
from octavo.planner.sources import Numbers, geometry_of_numbers, open_geometry
from tests.planner.small_configs import CASES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30


def compared(name: str = "smollm2", context: int = 8192, **request: object) -> Comparison:
    given = {"memory_bytes": GIB, **request}
    return compare(open_geometry(name), PlanRequest(context=context, **given))  # type: ignore[arg-type]


def measured(kv_format: str, kl: float, *, is_good: bool) -> Measured:
    return Measured(kv_format, kl, 2 * kl, 0.99, "measured now", is_good)


def test_every_way_and_every_combination_is_there() -> None:
    found = compared()
    keys = {(one.heads.name, one.kv_format, one.tokens.name) for one in found.options}
    assert len(keys) == len(found.options)
    heads, formats, tokens = ({key[at] for key in keys} for at in range(3))
    assert heads == {AS_TRAINED, "MQA", "MLA"}
    assert formats == set(FORMAT_BYTES)
    assert {name.partition(":")[0].partition(" ")[0] for name in tokens} == {
        ALL_TOKENS,
        "window",
        "streaming",
        "h2o",
        "snapkv",
    }
    assert found.baseline.ways("bf16") == ()
    assert (found.baseline.kv_format, found.baseline.tokens.kept) == ("bf16", 8192)
    assert {one.kv_format for one in found.having("bits")} == set(FORMAT_BYTES) - {"bf16"}
    assert ("MQA", "int8") in {(one.heads.name, one.kv_format) for one in found.having("heads", "bits", "tokens")}


@pytest.mark.parametrize("kv_format", FORMAT_BYTES)
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_bytes_are_those_that_the_engine_allocates(name: str, kv_format: str) -> None:
    found = compared(name)
    option = next(one for one in found.options if one.kv_format == kv_format and one.tokens.name == ALL_TOKENS)
    layers: dict[int, LayerGeometry] = {}
    for group in found.plan.geometry.groups:
        for layer in group.layer_indices:
            layers[layer] = LayerGeometry(group.num_kv_heads, group.head_dim, kv_format, group.window)
    spec = KVSpec(build_groups([layers[at] for at in sorted(layers)]), 16)
    assert option.kv_bytes == spec.blocks_for_tokens(8192) * spec.bytes_per_block
    assert option.requests == found.plan.kv_budget_bytes // spec.bytes_per_block // spec.blocks_for_tokens(8192)


@pytest.mark.parametrize("context", [1024, 8000, 8192])
def test_policies_keep_what_they_say(context: int) -> None:
    for option in compared(context=context).having("tokens"):
        assert option.tokens.kept % 16 == 0
        assert option.tokens.kept <= option.tokens.peak <= -(-context // 16) * 16
        policy = option.tokens.policy
        if policy is not None and policy.startswith("streaming"):
            sinks, recent, piece = map(int, policy.partition(":")[2].split(","))
            assert StreamingLLM(sinks, recent, piece).plan(16).capacity == option.tokens.kept
        assert option.tokens.is_offered == (policy is None or is_offered(policy))


def test_a_prompt_that_is_held_whole_counts_once() -> None:
    """SnapKV chooses when the prompt has been computed: one request is at its peak, the others have shrunk."""
    option = next(one for one in compared().having("tokens") if (one.tokens.policy or "").startswith("snapkv"))
    size = 16 * 23_040
    assert option.peak_kv_bytes == 8192 * 23_040
    blocks = compared().plan.num_blocks or 0
    assert option.requests == 1 + (blocks - 512) // (option.kv_bytes // size)


def test_fewer_heads_and_latents() -> None:
    found = compare(open_geometry("llama-2-7b"), PlanRequest(context=4096, memory_bytes=40 * GIB))
    heads = {one.heads.name: one for one in found.having("heads")}
    assert set(heads) == {"GQA-16", "GQA-8", "MQA", "MLA"}
    assert heads["MQA"].kv_bytes * 32 == found.baseline.kv_bytes
    assert heads["MLA"].kv_bytes / found.baseline.kv_bytes == pytest.approx(4.5 / 64), "9/2 d_h of 2 n_h d_h"
    assert "octavo convert --kv-heads 8" in heads["GQA-8"].needs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family_has_an_answer(case: str) -> None:
    model_type, config = CASES[case]
    found = compare(
        geometry_of({"model_type": model_type, **config}, case), PlanRequest(context=128, kv_cache_memory=1 << 30)
    )
    assert found.baseline.requests > 0
    assert json.loads(json.dumps(compression_json(told(found))))["rows"]


def test_a_format_that_cannot_hold_the_heads_is_told() -> None:
    geometry = geometry_of_numbers(Numbers(layers=2, kv_heads=2, head_dim=48))
    found = compare(geometry, PlanRequest(context=512, kv_cache_memory=1 << 24))
    skipped = dict(found.skipped)
    assert "multiple of 32" in skipped["k8v4"]
    assert "int8" not in skipped


def test_what_nothing_can_hold_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"no way to keep 8192 tokens fits: the smallest \(heads M.*there are 4096"):
        compared(memory_bytes=None, kv_cache_memory=4096)
    with pytest.raises(ConfigError, match="leaves nothing of 1000 bytes"):
        compared(memory_bytes=1000)
    with pytest.raises(ConfigError, match="nothing says how much memory"):
        compared(memory_bytes=None)


def test_what_fits_is_left_as_it_is() -> None:
    for scenario in SCENARIOS:
        advice = advise(compared(), scenario, 1)
        assert (advice.flags, advice.is_enough) == ("--kv-cache-dtype bf16", True)
        assert "nothing needs to be given up" in advice.reason


def test_the_least_change_is_taken() -> None:
    found = compared()
    fits = found.baseline.requests
    for scenario in SCENARIOS:
        assert advise(found, scenario, fits + 1).option.kv_format == "int8"
    int8 = advise(found, "chat", fits + 1).option
    assert advise(found, "chat", int8.requests + 1).option.kv_format == "k8v4"
    many = advise(found, "chat", 4 * fits)
    assert many.flags.startswith("--kv-cache-dtype bf16 --kv-policy streaming:")
    assert many.option.requests >= 4 * fits


def test_agents_and_documents_keep_all_tokens() -> None:
    found = compared()
    advice = advise(found, "agents", 1000)
    assert (advice.is_enough, advice.option.tokens.name) == (False, ALL_TOKENS)
    smallest = min(
        (one for one in found.options if not one.needs and one.tokens.name == ALL_TOKENS), key=lambda o: o.kv_bytes
    )
    assert advice.option.requests == smallest.requests
    assert "1000 requests that were asked for" in advice.reason
    document = advise(found, "document", 1000).option.tokens
    assert document.name == ALL_TOKENS or (document.policy or "").startswith("snapkv")


def test_what_training_would_give_is_named() -> None:
    found = compared()
    assert "a model trained with" in advise(found, "agents", found.baseline.requests * 5).reason


def test_measures_decide() -> None:
    found = compared()
    wanted = found.baseline.requests + 1
    bad = advise(found, "agents", wanted, [measured("int8", 0.5, is_good=False)])
    assert bad.option.kv_format == "fp8_e4m3"
    good = [measured("int8", 0.5, is_good=False), measured("k8v4", 0.01, is_good=True)]
    advice = advise(found, "agents", wanted, good)
    assert advice.option.kv_format == "k8v4", "what was measured goes before what was not"
    assert "KL 0.0100" in advice.reason
    nothing = advise(found, "agents", wanted, [measured(name, 1.0, is_good=False) for name in FORMAT_BYTES])
    assert (nothing.is_enough, nothing.option) == (False, found.baseline)


def test_a_certificate_is_read() -> None:
    row = {"format": "int8", "kl_mean": 0.001, "kl_p99": 0.01, "top1": 0.99, "certified": True}
    mixed = {**row, "format": "int8 and bf16", "skip_layers": [0]}
    found = of_certificate({"rows": [row, mixed, {"format": "odd"}, 7]}, "c.json")
    assert found == (Measured("int8", 0.001, 0.01, 0.99, "certificate c.json", True),)
    for odd in (None, [], {"rows": "x"}, {}):
        assert of_certificate(odd, "c.json") == ()


def test_stored_measures_are_those_of_the_benchmarks() -> None:
    formats = {}
    for name, ending in (
        ("kv_formats_smollm2", ", uncalibrated"),
        ("kv_formats_smollm2_calibrated", ", calibrated by hadamard"),
    ):
        for one in json.loads((RESULTS / f"{name}.json").read_text())["texts"][0]["rows"]:
            formats[f"benchmarks/results/{name}.json", one["format"].removesuffix(ending)] = one
    heads = {one["kv_heads"]: one for one in json.loads((RESULTS / "fewer_kv_heads_smollm2.json").read_text())["rows"]}
    stored = [one for one in known_evidence("SmolLM2-135M-Instruct.Q4_1.gguf") if one.kind == "stored"]
    assert {one.what for one in stored if one.way == "bits"} == {"bf16", "int8", "fp8_e4m3", "k8v4", "int4"}
    assert f"{heads[1]['perplexity']}; {heads[3]['perplexity']}" in stored[1].result
    prose = json.loads((RESULTS / "dropped_tokens.json").read_text())["rows"]["prose"]
    dropped = {one["kv_policy"]: one for one in prose}
    policy, whole = dropped["streaming:16,432,64"], dropped["all"]
    assert stored[2].result == f"{policy['perplexity']}; {whole['perplexity']} with all tokens"
    for one in stored:
        if one.way == "bits":
            row = formats[one.source, one.what]
            assert one.result == f"{row['kl_mean']:.5f} nats, same best token {row['top1']:.2%}"
            assert f"{row['tokens']:,} tokens" in one.measured
            assert ("calibrated" in one.source) == ("calibrated" in one.measured)
    book = json.loads((RESULTS / "compress_smollm2.json").read_text())
    likely = {
        one["tokens"]: one for one in book["likelihoods"] if one["kv_cache_dtype"] == "bf16" and one["heads"] != "MQA"
    }
    shown = [f"{likely[name]['perplexity']:.2f}" for name in ("h2o:224,112,32", "all", "streaming:4,208,32")]
    assert stored[-1].result == "{}; {} with all tokens, {} with streaming and as many kept".format(*shown)
    assert not [one for one in known_evidence("llama-3.1-8b") if one.kind == "stored"]


def test_every_published_figure_has_its_source() -> None:
    found = [one for one in known_evidence("x") if one.kind == "published"]
    assert {one.way for one in found} == {"heads", "bits", "tokens"}
    for one in found:
        assert all((one.model, one.measured, one.result, one.source))
        assert "arXiv" in one.source or "vLLM" in one.source
    assert [one.what for one in found if one.is_about("streaming:4,1024,256")] == ["streaming"]
    assert [one.what for one in found if one.is_about("GQA-4")] == ["GQA-8"]


def told(found: Comparison) -> Compression:
    return Compression(found, tuple(advise(found, one, 1) for one in SCENARIOS), known_evidence("smollm2"), (), 1)


def test_text_and_json_tell_the_same() -> None:
    found = told(compared())
    text, made = compression_text(found), compression_json(found)
    for title in ("As it is", "Fewer heads", "Fewer bits", "Fewer tokens", "Together", "Recommended"):
        assert f"\n{title}" in text
    for advice in made["recommendations"]:
        assert f"  {advice['scenario']}: {advice['flags']}" in text
    row = next(one for one in made["rows"] if one["kv_cache_dtype"] == "int8" and one["ways"] == ["bits"])
    assert row["kv_bytes"] == 8192 * 30 * 3 * 132
    assert row["relative"] == pytest.approx(132 / 256)
    streaming = next(one for one in made["rows"] if (one["kv_policy"] or "").startswith("streaming"))
    assert [made["evidence"][at]["what"] for at in streaming["evidence"]] == ["streaming", "streaming"]
