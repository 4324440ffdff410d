"""The Python interface: octavo.LLM and load() on tiny models, what they refuse, and the real model once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo
from octavo import LLM, Completion, ExecutorConfig, SamplingParams, SchedulerOptions
from octavo.cli.loading import OpenModel
from octavo.core.step import StepPlan, StepResult
from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    MemoryBudgetError,
    ModelError,
)
from octavo.executor.kv_storage import KVStorage
from octavo.executor.model_executor import ModelExecutor
from tests.models.tiny_models import make_tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = ["The quick brown fox", "A cache keeps what was computed, so that", "user system assistant: please tell me"]
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, KV heads, head_dim, f32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=2) as made:
        yield made
        status = made.model.core.status()
        assert (status.running, status.waiting, status.used_blocks) == (0, 0, 0)


def one(llm: LLM, prompt: Any, params: SamplingParams | None = GREEDY) -> Completion:
    (completion,) = llm.generate(prompt, params)
    return completion


# -- the package


def test_import_is_light_and_lazy() -> None:
    code = (
        "import sys; before = set(sys.modules); import octavo; "
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in "
        "('octavo', 'numpy', 'tokenizers', 'jinja2', 'gguf', 'torch', 'safetensors', 'importlib_metadata')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['octavo']"


def test_errors_and_parameters_load_without_numpy_or_kernels() -> None:
    code = (
        "import sys, octavo; octavo.SamplingParams(); octavo.CapacityError; "
        "print([m for m in ('numpy', 'octavo.kernels', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_there_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1.2.3")
    assert octavo.__version__ == "octavo 1.2.3"
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)
    with pytest.raises(AttributeError, match="'octavo' has no attribute 'Llm'"):
        _ = octavo.Llm  # type: ignore[attr-defined]


# -- prompts


def test_texts_token_ids_and_lists_of_either(llm: LLM) -> None:
    ids = [llm.model.tokenizer.encode(text) for text in TEXTS]
    alone = [one(llm, text).text for text in TEXTS]
    assert len(set(alone)) == len(TEXTS)
    assert [one(llm, token_ids).text for token_ids in ids] == alone
    assert [c.text for c in llm.generate(TEXTS, GREEDY)] == alone
    assert [c.text for c in llm.generate(ids, GREEDY)] == alone
    assert [c.text for c in llm.generate([TEXTS[0], ids[1], tuple(ids[2])], GREEDY)] == alone
    assert one(llm, np.array(ids[0])).text == alone[0]
    assert llm.generate([], GREEDY) == []


def test_a_completion_says_what_was_done(llm: LLM) -> None:
    done = one(llm, TEXTS[1])
    assert done.finish_reason == "length"
    assert done.stop_reason is None
    assert done.error is None
    assert done.logprobs is None
    assert len(done.token_ids) == 12
    assert done.text == llm.model.tokenizer.decode(done.token_ids)
    assert done.num_prompt_tokens == len(llm.model.tokenizer.encode(TEXTS[1]))
    assert done.num_cached_tokens == 0


def test_the_cache_is_kept_between_calls_and_changes_no_answer(llm: LLM) -> None:
    prompt = list(range(10, 60))
    cold = one(llm, prompt)
    warm = one(llm, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)  # whole blocks are kept
    assert warm.token_ids == cold.token_ids


def test_prompts_of_one_call_run_together_and_share_their_beginning(llm: LLM) -> None:
    start = list(range(100, 140))
    prompts = [[*start, 200 + i] for i in range(6)]
    done = llm.generate(prompts, GREEDY)
    assert [c.num_cached_tokens >= 32 for c in done] == [False, True, True, True, True, True]
    steps = llm.model.core.status().steps
    assert steps < 6 * 12
    assert [c.token_ids for c in done] == [one(llm, prompt).token_ids for prompt in prompts]


def test_params_for_each_prompt(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=2, temperature=0.0), SamplingParams(max_tokens=7, temperature=0.0)
    assert [len(c.token_ids) for c in llm.generate(TEXTS[:2], [short, long])] == [2, 7]
    with pytest.raises(InvalidRequestError, match="1 sampling params for 2 prompts"):
        llm.generate(TEXTS[:2], [short])


# -- ends


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = one(llm, TEXTS[0])
    stop = whole.text[5:8]
    done = one(
        llm, TEXTS[0], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop, "no such text"))
    )
    assert done.text == whole.text[: whole.text.index(stop)]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert len(done.token_ids) < 12
    kept = SamplingParams(
        max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True
    )
    assert one(llm, TEXTS[0], kept).text == whole.text[: whole.text.index(stop) + len(stop)]


def test_a_stop_token_ends_the_text(llm: LLM) -> None:
    whole = one(llm, TEXTS[0])
    token_id = whole.token_ids[4]
    done = one(llm, TEXTS[0], SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(token_id,)))
    index = whole.token_ids.index(token_id)
    assert done.token_ids == whole.token_ids[: index + 1]
    assert done.text == llm.model.tokenizer.decode(whole.token_ids[:index])
    assert (done.finish_reason, done.stop_reason) == ("stop", token_id)


def test_the_models_own_end_can_be_ignored(llm: LLM) -> None:
    end = llm.model.eos_token_ids[0]
    ends = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((end, 100.0),))
    done = one(llm, TEXTS[0], ends)
    assert (done.finish_reason, done.stop_reason, done.token_ids, done.text) == ("stop", None, (end,), "")
    ignored = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=((end, 100.0),), ignore_eos=True)
    assert one(llm, TEXTS[0], ignored).token_ids == (end,) * 5
    later = SamplingParams(max_tokens=5, min_tokens=3, temperature=0.0, logit_bias=((end, 100.0),))
    done = one(llm, TEXTS[0], later)
    assert len(done.token_ids) == 4
    assert done.token_ids.index(end) == 3


def test_logprobs(llm: LLM) -> None:
    done = one(llm, TEXTS[0], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3))
    assert done.logprobs is not None
    assert [token.token_id for token in done.logprobs] == list(done.token_ids)
    for token in done.logprobs:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.logprob is not None
        assert token.logprob <= 0


def test_seeds(tiny: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True)

    def texts(seed: int) -> list[str]:
        with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, seed=seed) as llm:
            return [c.text for c in llm.generate([TEXTS[0]] * 3, params)]

    first = texts(1)
    assert len(set(first)) == 3, "each request has a stream of its own"
    assert texts(1) == first
    assert texts(2) != first
    seeded = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True, seed=5)
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES) as llm:
        assert len({c.text for c in llm.generate([TEXTS[0]] * 3, seeded)}) == 1


# -- chat


def test_chat_renders_the_models_template(llm: LLM) -> None:
    talk: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
    (done,) = llm.chat(talk, GREEDY)
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert done == one_again(llm, text)
    both = llm.chat([talk, [*talk, {"role": "assistant", "content": done.text}, *talk]], GREEDY)
    assert both[0].token_ids == done.token_ids
    assert both[1].num_prompt_tokens > both[0].num_prompt_tokens


def one_again(llm: LLM, text: str) -> Completion:
    llm.model.core.reset_prefix_cache()
    return one(llm, llm.model.tokenizer.encode(text, add_special_tokens=False))


def test_a_talk_that_goes_on_is_encoded_from_where_it_is_new(llm: LLM) -> None:
    """In Python and in `octavo chat`: what a turn encodes does not grow with the talk."""
    tokenizer, template = llm.model.tokenizer, llm.model.chat_template
    assert template is not None
    opened, talk, each = OpenModel("tiny", llm.model), [], []
    for number in range(100):
        talk.append({"role": "user", "content": f"the quick brown fox {number}"})
        before = tokenizer.encoding_counts
        ids = opened.encode_chat(talk)
        after = tokenizer.encoding_counts
        assert ids == tokenizer.encode(template.render(talk), add_special_tokens=False)
        each.append(after.encoded_characters - before.encoded_characters)
        talk.append({"role": "assistant", "content": f"a cache keeps what was computed {number}"})
    assert max(each[1:]) < 3 * max(each[:10])
    assert sum(each) < 2 * len(template.render(talk))
    (done,) = llm.chat(talk[:3], GREEDY)
    before = tokenizer.encoding_counts
    assert llm.chat(talk[:3], GREEDY)[0].token_ids == done.token_ids
    assert tokenizer.encoding_counts.encoded_characters == before.encoded_characters


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama2")
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"not_a_chat_template"'))
    with (
        LLM(str(directory), kv_cache_memory=64 * BLOCK_BYTES) as llm,
        pytest.raises(ConfigError, match="no chat template"),
    ):
        llm.chat([{"role": "user", "content": "Hello"}], GREEDY)


# -- what is refused


def test_a_prompt_that_cannot_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    too_long = [*range(3, 333), *range(3, 183)]
    with pytest.raises(CapacityError, match=r"prompt of 510 tokens \+ max_tokens 12 = 522 tokens > context of 512"):
        llm.generate([TEXTS[0], too_long], GREEDY)
    assert llm.model.core.status().steps == 0
    assert one(llm, TEXTS[0]).finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "0 tokens"),
        ([], GREEDY, "0 tokens"),
        ([5, 336], GREEDY, "token id 336"),
        ([5, -1], GREEDY, "no token id"),
        (
            "x",
            SamplingParams(logit_bias=((336, 1.0),)),
            "logit_bias names token 336; this model's ids go from 0 to 335",
        ),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused(llm: LLM, prompt: Any, params: SamplingParams, message: str) -> None:
    prompts = [prompt] if prompt == [] else prompt
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params)


def test_an_unknown_option_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option 'kv_cache_size'.*kv_cache_memory"):
        LLM(str(tiny), kv_cache_size=1)


def test_a_closed_llm_answers_no_more(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES)
    llm.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        one(llm, TEXTS[0])


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


def test_one_stop_string_is_not_taken_letter_by_letter(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop is the string 'END'; give a tuple"):
        one(llm, TEXTS[0], SamplingParams(stop="END"))  # type: ignore[arg-type]


def test_the_same_answers_through_the_engine_for_asyncio(tiny: Path, llm: LLM) -> None:
    wanted = [c.text for c in llm.generate(TEXTS, GREEDY)]
    model = octavo.load(str(tiny), executor=ExecutorConfig(kv_cache_memory=64 * BLOCK_BYTES))
    engine = octavo.AsyncEngine(model.core, model.tokenizer, octavo.EngineConfig(eos_token_ids=model.eos_token_ids))

    async def ask(number: int, text: str) -> str:
        deltas = engine.generate(model.tokenizer.encode(text), GREEDY, request_id=str(number))
        return "".join([delta.text async for delta in deltas])

    async def main() -> list[str]:
        engine.start()
        try:
            return await asyncio.gather(*[ask(number, text) for number, text in enumerate(TEXTS)])
        finally:
            await engine.shutdown(timeout_s=5)

    assert asyncio.run(main()) == wanted


# -- facts


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


def test_another_chat_template_can_be_given(tiny: Path) -> None:
    model = octavo.load(
        str(tiny), executor=ExecutorConfig(kv_cache_memory=64 * BLOCK_BYTES), chat_template="{{ messages[0].content }}!"
    )
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "Hey"}]) == "Hey!"


def test_the_models_own_advice_is_the_default(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama2")
    (directory / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "top_k": 1}')
    with LLM(str(directory), kv_cache_memory=64 * BLOCK_BYTES) as llm:
        assert llm.model.default_sampling == {"temperature": 0.5, "top_k": 1}
        greedy = SamplingParams(temperature=0.0)
        assert one(llm, TEXTS[0], None).token_ids == one(llm, TEXTS[0], greedy).token_ids  # top_k 1


# -- faults while it runs


def test_a_fault_of_the_executor_comes_through_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [c.token_ids for c in llm.generate(TEXTS, GREEDY)]
    real, calls = ModelExecutor.execute, 0

    def fail_at_the_third_step(self: ModelExecutor, plan: StepPlan) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(self, plan)

    monkeypatch.setattr(ModelExecutor, "execute", fail_at_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, GREEDY)
    assert not llm.model.core.has_work
    assert [c.token_ids for c in llm.generate(TEXTS, GREEDY)] == whole


def test_a_request_that_fails_while_it_runs_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [c.token_ids for c in llm.generate(TEXTS, GREEDY)]
    real = ModelExecutor.execute

    def fail_one(self: ModelExecutor, plan: StepPlan) -> StepResult:
        result = real(self, plan)
        lost = [row.request_id for row in plan.rows if row.sample is not None and row.sample.position == 4][1:2]
        sampled = {name: token for name, token in result.sampled.items() if name not in lost}
        return StepResult(sampled, {**result.failed, **dict.fromkeys(lost, "logits are broken")}, result.num_tokens)

    monkeypatch.setattr(ModelExecutor, "execute", fail_one)
    done = llm.generate(TEXTS, GREEDY)
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert done[1].error == "logits are broken"
    assert done[1].token_ids == whole[1][:4]
    assert [done[0].token_ids, done[2].token_ids] == [whole[0], whole[2]]


# -- the real model


def test_smollm2_answers(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path), kv_cache_memory=128 << 20) as llm:
        assert one(llm, "The capital of France is", SamplingParams(max_tokens=4, temperature=0.0)).text.startswith(
            " Paris"
        )
        (answer,) = llm.chat(
            [{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(max_tokens=30, temperature=0.0)
        )
        assert "4" in answer.text
        assert answer.finish_reason == "stop"
