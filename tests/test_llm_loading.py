"""Loading for the Python interface: what is planned, what is said of it, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import LLM, ExecutorConfig, SamplingParams, SchedulerOptions
from octavo.errors import (
    CapacityError,
    ConfigError,
    MemoryBudgetError,
    ModelError,
)
from octavo.executor.kv_storage import KVStorage
from octavo.models.decoder import DecoderScratch
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model
from tests.tiny_llm import BLOCK_BYTES, TEXTS, one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


@pytest.mark.parametrize(
    ("scheduler", "executor", "error", "parts"),
    [
        ({"max_model_len": 513}, {}, ConfigError, ("513", "512")),
        ({"max_model_len": 160}, {"kv_cache_memory": 9 * BLOCK_BYTES}, MemoryBudgetError, ("10 blocks", "9 blocks")),
        ({}, {"kv_cache_memory": BLOCK_BYTES - 1}, MemoryBudgetError, (str(BLOCK_BYTES),)),
        ({}, {"kv_cache_memory": 1 << 60}, MemoryBudgetError, (str(1 << 60), "--kv-cache-memory")),
        ({}, {"instruction_set": "sse9"}, ConfigError, ("'sse9'",)),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused(
    tiny: Path, scheduler: dict[str, Any], executor: dict[str, Any], error: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        octavo.load(str(tiny), scheduler=SchedulerOptions(**scheduler), executor=ExecutorConfig(**executor))
    for part in parts:
        assert part in str(caught.value)


def test_options_are_checked_before_a_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=63)
    with pytest.raises(ConfigError, match="max_model_len is 1"):
        SchedulerOptions(max_model_len=1)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nothing"))


def test_the_plan_is_the_allocation(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KVStorage] = []

    def keep(*arguments: Any, **options: Any) -> KVStorage:
        made.append(KVStorage(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("octavo.llm.KVStorage", keep)
    model = octavo.load(
        str(tiny),
        scheduler=SchedulerOptions(max_model_len=200),
        executor=ExecutorConfig(kv_cache_memory=20 * BLOCK_BYTES + 5),
    )
    (storage,) = made
    status = model.core.status()
    assert (
        storage.pool.nbytes == model.plan.kv_bytes == status.num_blocks * status.kv_bytes_per_block == 20 * BLOCK_BYTES
    )
    assert (model.max_model_len, model.weights_dtype, model.kv_cache_dtype) == (200, "f32", "f32")
    assert (model.vocab_size, model.eos_token_ids, model.degraded) == (336, (2, 0), ())
    assert str(model.plan).startswith(f"KV cache: 20 blocks x 16 = 320 tokens ({20 * BLOCK_BYTES} bytes)")
    assert len(model.digest) == 64
    assert model.weights_bytes > 100_000


def test_a_context_that_does_not_fit_is_lowered_and_told(tiny: Path) -> None:
    model = octavo.load(str(tiny), executor=ExecutorConfig(kv_cache_memory=5 * BLOCK_BYTES))
    assert model.max_model_len == 80
    (told,) = model.degraded
    assert "80 instead of the model's 512" in told


def test_where_the_pool_is_what_is_short_the_cure_is_its_memory(tiny: Path) -> None:
    with (
        LLM(str(tiny), kv_cache_memory=5 * BLOCK_BYTES) as llm,
        pytest.raises(CapacityError, match=r"needs 7 KV blocks .* the pool has 5; .*--kv-cache-memory") as caught,
    ):
        llm.generate([list(range(3, 93))], SamplingParams(max_tokens=10))
    assert "--max-model-len" not in str(caught.value)


@pytest.mark.parametrize("available", [1 << 20, 10_000])
def test_memory_that_is_not_there_is_told_before_the_weights_are_loaded(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr("octavo.llm.load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("octavo.llm.available_memory_bytes", lambda: available)
    with pytest.raises(MemoryBudgetError, match=f"{available} bytes of memory are available"):
        octavo.load(str(tiny), executor=ExecutorConfig(kv_cache_memory=1 << 20))


def test_an_alias_that_cannot_be_run_is_told_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.models.aliases.SUPPORTED_ARCHITECTURES", ("LlamaForCausalLM",))
    with pytest.raises(ModelError, match=r"gemma3-270m.*Gemma3ForCausalLM.*is not supported"):
        LLM("gemma3-270m", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_a_window_has_its_whole_context(tmp_path: Path) -> None:
    directory = str(make_tiny_model(tmp_path, "mistral_window"))
    model = octavo.load(directory, executor=ExecutorConfig(kv_cache_memory=64 * BLOCK_BYTES))
    assert model.max_model_len == 512
    assert model.degraded == ()
    with pytest.raises(ConfigError, match="513 is more than the 512 positions"):
        octavo.load(directory, scheduler=SchedulerOptions(max_model_len=513))


def test_f16_models_say_what_they_lose(tmp_path: Path) -> None:
    directory = str(make_tiny_model(tmp_path, "llama2", dtype="f16"))
    lost = octavo.load(directory, executor=ExecutorConfig(kv_cache_memory=1 << 20))
    assert (lost.weights_dtype, lost.kv_cache_dtype) == ("bf16", "f16")
    assert [line.split()[0] for line in lost.degraded] == ["weights_dtype"]
    kept = octavo.load(
        directory, executor=ExecutorConfig(weights_dtype="f32", kv_cache_dtype="f32", kv_cache_memory=2 << 20)
    )
    assert kept.degraded == ()


def test_layers_can_be_left_out_of_the_kv_format(tiny: Path) -> None:
    """Every layer left out is no format at all; some, and the status says which."""
    options: dict[str, Any] = {"kv_cache_memory": 64 * BLOCK_BYTES, "threads": 1}
    plain = one(LLM(str(tiny), **options), TEXTS[0])
    whole = LLM(str(tiny), kv_cache_dtype="int8", kv_cache_skip_layers=(0, 1, 2), **options)
    assert whole.model.kv_cache_dtype == "f32"
    assert one(whole, TEXTS[0]).token_ids == plain.token_ids
    mixed = LLM(str(tiny), kv_cache_dtype="int8", kv_cache_skip_layers=(1,), **options)
    assert mixed.model.kv_cache_dtype == "int8 (f32 in layers 1)"
    spec = mixed.model.plan.spec
    assert {(group.kv_format, group.layer_indices) for group in spec.groups} == {("int8", (0, 2)), ("f32", (1,))}
    assert spec.padding_bytes_per_block > 0
    assert mixed.model.memory.kv_allocated_bytes == mixed.model.plan.kv_bytes
    assert "padding" in str(mixed.model.plan)
    one(mixed, TEXTS[0])
    with pytest.raises(ConfigError, match=r"names layer 3; this model's layers go from 0 to 2"):
        LLM(str(tiny), kv_cache_dtype="int8", kv_cache_skip_layers=(3,))
    with pytest.raises(ConfigError, match="counted from 0"):
        ExecutorConfig(kv_cache_skip_layers=(-1,))


def test_a_broken_chat_template_leaves_completions(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama2")
    (directory / "chat_template.jinja").write_text("{% for %}")
    with LLM(str(directory), kv_cache_memory=64 * BLOCK_BYTES) as llm:
        assert len(one(llm, TEXTS[0]).token_ids) > 0
        (told,) = llm.model.degraded
        assert "chat" in told
        assert "broken at line 1" in told
        with pytest.raises(ConfigError, match="broken at line 1"):
            llm.chat([{"role": "user", "content": "Hey"}])
    with pytest.raises(ModelError, match="broken at line 1"):  # one that was asked for is not left out
        octavo.load(str(directory), chat_template="{% for %}")


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [("qwen3", {}, 128), ("qwen3", {"max_num_prefill_tokens": 32}, 32), ("gpt2", {}, 32), ("falcon_7b", {}, 32)],
)
def test_larger_steps_are_for_families_that_compute_in_blocks(
    family: str, given: dict, expected: int, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, family) if family == "qwen3" else make_family(tmp_path / family, family)
    with LLM(str(path), kv_cache_memory=1 << 20, max_num_seqs=8, max_num_batched_tokens=32, threads=1, **given) as llm:
        assert llm.model.scheduler_config.most_step_tokens == expected
        assert llm.generate([[5, 6, 7] * 50], SamplingParams(max_tokens=2))[0].num_generated_tokens == 2


def test_larger_steps_of_other_families_are_refused(tmp_path: Path) -> None:
    path = make_family(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match=r"max_num_prefill_tokens is 513.*max_num_batched_tokens \(512\)"):
        LLM(str(path), max_num_prefill_tokens=513)


@pytest.mark.parametrize("family", ["llama2", "gpt2"])
def test_idle_work_makes_the_memory_of_the_longest_step_ready_and_changes_no_answer(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    asked: list[tuple[int, bool]] = []
    prepare = DecoderScratch.prepare

    def seen(scratch: DecoderScratch, num_rows: int) -> bool:
        asked.append((num_rows, prepare(scratch, num_rows)))
        return asked[-1][1]

    monkeypatch.setattr(DecoderScratch, "prepare", seen)
    path = tiny if family == "llama2" else make_family(tmp_path / family, family)
    with LLM(str(path), kv_cache_memory=1 << 20, max_num_seqs=8, max_num_batched_tokens=32, threads=1) as llm:
        before = llm.generate([[5, 6, 7] * 50], SamplingParams(max_tokens=9, temperature=0))[0].token_ids
        llm.model.core.reset_prefix_cache()
        idle_work = llm.model.idle_work
        assert idle_work is not None
        while idle_work():
            pass
        assert llm.generate([[5, 6, 7] * 50], SamplingParams(max_tokens=9, temperature=0))[0].token_ids == before
    if family == "llama2":
        assert asked[0] == (128, True)
        assert asked[-1] == (128, False), "then the KV cache's"
    else:
        assert not asked
