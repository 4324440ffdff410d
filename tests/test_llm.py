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
from octavo import LLM, Completion, ExecutorConfig, SamplingParams
from octavo.cli.loading import OpenModel
from octavo.core.step import StepPlan, StepResult
from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
)
from octavo.executor.model_executor import ModelExecutor
from tests.models.tiny_models import make_tiny_model
from tests.tiny_llm import BLOCK_BYTES, GREEDY, TEXTS, one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama2")


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), kv_cache_memory=64 * BLOCK_BYTES, threads=2) as made:
        yield made
        status = made.model.core.status()
        assert (status.running, status.waiting, status.used_blocks) == (0, 0, 0)


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
        assert "4" in what_is_two_and_two(llm).text
    # where the model itself stops is nearly a tie: with activations in 8 bits it may go on
    with LLM(str(smollm2_path), kv_cache_memory=128 << 20, weights_dtype="f32") as llm:
        answer = what_is_two_and_two(llm)
        assert "4" in answer.text
        assert answer.finish_reason == "stop"


def what_is_two_and_two(llm: LLM) -> Completion:
    asked = [{"role": "user", "content": "What is 2 + 2?"}]
    (answer,) = llm.chat(asked, SamplingParams(max_tokens=30, temperature=0.0))
    return answer
