"""The asynchronous engine over the real core: deltas, stops, seeds, clocks, tenants."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest, merge_deltas
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import (
    ConfigError,
    EngineStoppedError,
)
from octavo.testing.fake_clock import FakeClock
from tests.engine.engine_case import (
    EOS,
    PROMPT,
    GatedExecutor,
    SayingExecutor,
    checking_executor,
    new_core,
    new_engine,
    run,
    text_of,
    tokens_of,
    whole,
)


def test_text_is_the_text_of_the_tokens(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor("Grüße, 東京! 👋🏽"))
    answer = run(engine, whole(engine, SamplingParams(max_tokens=64)))
    assert answer.text == "Grüße, 東京! 👋🏽"
    assert (answer.finish_reason, answer.stop_reason, answer.error) == ("stop", None, None)
    assert answer.token_ids == (*tokens_of("Grüße, 東京! 👋🏽"), EOS)
    assert answer.num_output_tokens == len(answer.token_ids)
    assert answer.num_prompt_tokens == len(PROMPT)


def test_no_delta_splits_a_character(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor("aé東👋"))

    async def pieces() -> list[str]:
        return [
            delta.text
            async for delta in engine.generate(PROMPT, SamplingParams(max_tokens=64), request_id="a")
            if delta.text
        ]

    said = run(engine, pieces())
    assert "".join(said) == "aé東👋"
    assert "�" not in "".join(said)


def test_cut_in_the_middle_of_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor("東京"))
    answer = run(engine, whole(engine, SamplingParams(max_tokens=4)))
    assert (answer.text, answer.finish_reason) == ("東�", "length")


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        (("world",), False, "Hello, ", "world"),
        (("world",), True, "Hello, world", "world"),
        (("lo, w", "xyz"), False, "Hel", "lo, w"),
        (("nothing of that",), False, "Hello, world.", None),
        (("Hello, world.!",), False, "Hello, world.", None),  # held back to the end, and then sent
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, stop: tuple[str, ...], include: bool, text: str, reason: str | None
) -> None:
    engine = new_engine(tokenizer, SayingExecutor())
    params = SamplingParams(max_tokens=64, stop=stop, include_stop_str_in_output=include)
    answer = run(engine, whole(engine, params))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", reason)


@pytest.mark.parametrize("every_token", [True, False])
@pytest.mark.parametrize(
    ("stop", "include", "scored"),
    [
        (("world",), False, "Hello, "),
        (("world",), True, "Hello, world"),
        (("lo, ", "xyz"), False, "Hel"),
        (("Hello, world.!",), False, "Hello, world."),  # held back to the end, and then sent
    ],
)
def test_the_tokens_that_are_scored_are_those_of_the_text(
    tokenizer: Tokenizer, stop: tuple[str, ...], include: bool, scored: str, every_token: bool
) -> None:
    engine = new_engine(tokenizer, SayingExecutor())
    params = SamplingParams(max_tokens=64, stop=stop, include_stop_str_in_output=include, logprobs=0)

    async def work() -> list[GenerationDelta]:
        generation = await engine.submit([GenerationRequest("a", PROMPT, params, every_token=every_token)])
        deltas = []
        while not generation.finished:
            deltas += [delta for _, delta in await generation.take()]
        return deltas

    deltas = run(engine, work())
    answer = merge_deltas(deltas)
    assert answer.text == scored
    assert text_of([one.sampled.token_id for one in answer.scored_tokens]) == scored
    assert [one.text_offset for one in answer.scored_tokens] == list(range(len(scored)))
    for delta in deltas:  # one byte, one token: each comes with its text
        assert text_of([one.sampled.token_id for one in delta.scored_tokens]) == delta.text


def test_stop_string_frees_the_request_in_the_core(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor())

    async def work() -> None:
        await whole(engine, SamplingParams(max_tokens=64, stop=("Hello",)))
        core = (await engine.status()).core
        assert (core.running, core.waiting, core.used_blocks) == (0, 0, 0)
        assert core.generation_tokens == len("Hello")

    run(engine, work())


def test_stop_string_does_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor("ab"))
    params = SamplingParams(max_tokens=9, min_tokens=5, stop=("ab",), ignore_eos=True)
    answer = run(engine, whole(engine, params))
    assert answer.finish_reason == "stop"
    assert answer.num_output_tokens >= 5


def test_stop_token_ids_give_their_id_and_no_text(tokenizer: Tokenizer) -> None:
    (comma,) = tokens_of(",")
    engine = new_engine(tokenizer, SayingExecutor())
    answer = run(engine, whole(engine, SamplingParams(max_tokens=64, stop_token_ids=(comma,))))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Hello", "stop", comma)


def test_waiting_for_the_whole_gives_one_delta_equal_to_all(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor())
    params = SamplingParams(max_tokens=9, logprobs=2)

    async def work() -> tuple[GenerationDelta, list[tuple[int, GenerationDelta]]]:
        streamed = await whole(engine, params)
        generation = await engine.submit([GenerationRequest("b", PROMPT, params, every_token=False)])
        once = await generation.take()
        assert generation.finished
        return streamed, once

    streamed, once = run(engine, work())
    assert [index for index, _ in once] == [0]
    whole_answer = once[0][1]
    assert whole_answer.text == streamed.text == "Hello, wo"
    assert whole_answer.token_ids == streamed.token_ids
    assert whole_answer.scored_tokens == streamed.scored_tokens
    assert [scored.text_offset for scored in streamed.scored_tokens] == list(range(9))


def test_a_reader_that_falls_behind_gets_everything_in_fewer_deltas(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(SayingExecutor())
    engine = new_engine(tokenizer, executor)

    async def work() -> list[str]:
        generation = await engine.submit([GenerationRequest("a", PROMPT, SamplingParams(max_tokens=6))])
        executor.let(100)
        while (await engine.status()).core.finished["length"] == 0:
            await asyncio.sleep(0)
        return [delta.text for _, delta in await generation.take()]

    assert run(engine, work()) == ["Hello,"]


def test_seed_none_differs_and_a_seed_repeats(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)

    async def work() -> list[str]:
        unseeded = [await whole(engine, SamplingParams(max_tokens=24)) for _ in range(2)]
        seeded = [await whole(engine, SamplingParams(max_tokens=24, seed=-7)) for _ in range(2)]
        return [answer.text for answer in [*unseeded, *seeded]]

    first, second, third, fourth = run(engine, work())
    assert first != second
    assert third == fourth


def test_seeds_come_from_the_injected_source(tokenizer: Tokenizer) -> None:
    texts = []
    for source in (b"\x01" * 8, b"\x01" * 8, b"\x02" * 8):
        engine = AsyncEngine(new_core(checking_executor()), tokenizer, random_bytes=lambda _, source=source: source)
        texts.append(run(engine, whole(engine, SamplingParams(max_tokens=24))).text)
    assert texts[0] == texts[1] != texts[2]


def test_latencies_come_from_the_injected_clock(tokenizer: Tokenizer) -> None:
    clock = FakeClock()

    class SlowExecutor(SayingExecutor):
        def execute(self, plan: Any) -> Any:
            clock.advance(0.03)
            return super().execute(plan)

    engine = new_engine(tokenizer, SlowExecutor(), clock=clock.now)

    async def work() -> None:
        await whole(engine, SamplingParams(max_tokens=5))
        status = await engine.status()
        assert sum(status.time_to_first_token_s.counts) == 1
        assert status.time_to_first_token_s.total == pytest.approx(0.03)
        assert sum(status.inter_token_latency_s.counts) == 4
        assert status.inter_token_latency_s.counts[status.inter_token_latency_s.bounds.index(0.05)] == 4
        assert status.e2e_request_latency_s.total == pytest.approx(0.15)

    run(engine, work())


def test_tenants_never_hit_each_other_and_a_tenant_hits_itself(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor())

    async def work() -> list[int]:
        return [
            (await whole(engine, SamplingParams(max_tokens=2), namespace=namespace)).num_cached_tokens
            for namespace in ("one", "two", "one", "")
        ]

    cold, foreign, again, nobody = run(engine, work())
    assert (cold, foreign, nobody) == (0, 0, 0)
    assert again >= 32


def test_reset_drops_the_cache(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor())

    async def work() -> None:
        await whole(engine, SamplingParams(max_tokens=2))
        cached = (await engine.status()).core.cached_blocks
        assert cached > 0
        assert await engine.reset_prefix_cache() == cached
        assert (await whole(engine, SamplingParams(max_tokens=2))).num_cached_tokens == 0

    run(engine, work())


def test_long_texts_are_tokenised_beside_the_event_loop(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, config=EngineConfig(inline_characters=10))

    async def work() -> None:
        assert await engine.encode("short") == tokens_of("short")
        assert await engine.encode("a longer text") == tokens_of("a longer text")
        here, there = await engine.with_text(10, _thread_name), await engine.with_text(11, _thread_name)
        assert here == _thread_name()
        assert there.startswith("octavo-text")
        await engine.shutdown(0)
        with pytest.raises(EngineStoppedError):
            await engine.encode("a longer text")

    run(engine, work())


def _thread_name() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("wrong", [{"max_waiting": 0}, {"inline_characters": -1}])
def test_config_names_what_is_wrong(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is"):
        EngineConfig(**wrong)


@pytest.mark.parametrize(("include", "scored"), [(False, "ab"), (True, "ab,")])
def test_an_end_token_is_scored_only_where_it_is_text(tokenizer: Tokenizer, include: bool, scored: str) -> None:
    engine = new_engine(tokenizer, SayingExecutor("ab,cd"))
    params = SamplingParams(
        max_tokens=9, logprobs=0, stop_token_ids=tuple(tokens_of(",")), include_stop_str_in_output=include
    )
    answer = run(engine, whole(engine, params))
    assert answer.text == scored
    assert [one.sampled.token_id for one in answer.scored_tokens] == tokens_of(scored)
    assert answer.num_output_tokens == 3
