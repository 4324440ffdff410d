"""Which requests the asynchronous engine takes, and how those that are waiting leave: limits, ids, groups, aborts."""

from __future__ import annotations

import asyncio

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest, merge_deltas
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import (
    CapacityError,
    EngineOverloadedError,
    InvalidRequestError,
)
from tests.engine.engine_case import (
    PROMPT,
    GatedExecutor,
    SayingExecutor,
    checking_executor,
    new_engine,
    run,
    whole,
)


def test_what_can_never_fit_is_refused_at_once_with_the_arithmetic(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, num_blocks=4)

    async def work() -> None:
        with pytest.raises(CapacityError, match=r"needs 7 KV blocks .* the pool has 4"):
            await whole(engine, SamplingParams(max_tokens=60))
        with pytest.raises(CapacityError, match="context of 256"):
            await whole(engine, SamplingParams(max_tokens=1000))
        status = await engine.status()
        assert (status.refused, status.core.waiting, status.core.running) == (2, 0, 0)
        await whole(engine, SamplingParams(max_tokens=4))

    run(engine, work())


def test_all_or_none_of_a_group_is_admitted(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(SayingExecutor())
    engine = new_engine(tokenizer, executor)
    fits, never = SamplingParams(max_tokens=4), SamplingParams(max_tokens=999)

    async def work() -> None:
        with pytest.raises(CapacityError):
            await engine.submit([GenerationRequest("a", PROMPT, fits), GenerationRequest("b", PROMPT, never)])
        executor.let(100)
        status = await engine.status()
        assert (status.core.running, status.core.waiting) == (0, 0)
        assert dict(status.finished) == {"stop": 0, "length": 0, "abort": 1, "error": 0}

    run(engine, work())


def test_the_queue_is_bounded(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(SayingExecutor())
    engine = new_engine(tokenizer, executor, config=EngineConfig(max_waiting=2), max_num_seqs=1)
    params = SamplingParams(max_tokens=4)

    async def work() -> None:
        first = await engine.submit([GenerationRequest("first", PROMPT, params)])
        await asyncio.to_thread(executor.waiting.acquire)  # it runs, so it does not wait any more
        tasks = [
            asyncio.ensure_future(engine.submit([GenerationRequest(f"{index}", PROMPT, params)])) for index in range(3)
        ]
        await asyncio.sleep(0)
        executor.let(1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results[2:]] == [EngineOverloadedError]
        assert "2 requests wait" in str(results[2])
        executor.let(100)
        for generation in [first, *results[:2]]:
            assert isinstance(generation, type(first))
            while not generation.finished:
                await generation.take()

    run(engine, work())


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(SayingExecutor())
    engine = new_engine(tokenizer, executor)

    async def work() -> str:
        generation = await engine.submit([GenerationRequest("a", PROMPT, SamplingParams(max_tokens=5))])
        second = asyncio.ensure_future(whole(engine, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0)  # it is sent while the first one's step stands still
        executor.let(100)
        with pytest.raises(InvalidRequestError, match="already running"):
            await second
        text = ""
        while not generation.finished:
            text += "".join(delta.text for _, delta in await generation.take())
        return text

    assert run(engine, work()) == "Hello"


def test_closing_the_iterator_aborts(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(checking_executor())
    engine = new_engine(tokenizer, executor)

    async def work() -> None:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=200), request_id="a")
        executor.let(1)
        await anext(stream)
        await stream.aclose()
        executor.let(1)
        status = await engine.status()
        assert (status.core.running, status.core.used_blocks) == (0, 0)
        assert dict(status.finished)["abort"] == 1

    run(engine, work())


def test_cancelling_while_it_waits_for_admission_aborts(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(SayingExecutor())
    engine = new_engine(tokenizer, executor)

    async def work() -> None:
        first = await engine.submit([GenerationRequest("first", PROMPT, SamplingParams(max_tokens=3))])
        await asyncio.to_thread(executor.waiting.acquire)
        second = asyncio.ensure_future(whole(engine, SamplingParams(max_tokens=100)))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        executor.let(100)
        while not first.finished:
            await first.take()
        status = await engine.status()
        assert dict(status.finished) == {"stop": 0, "length": 1, "abort": 1, "error": 0}
        assert status.core.used_blocks == 0

    run(engine, work())


def test_abort_by_id_gives_the_reader_one_final_delta(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(checking_executor())
    engine = new_engine(tokenizer, executor)

    async def work() -> GenerationDelta:
        generation = await engine.submit([GenerationRequest("a", PROMPT, SamplingParams(max_tokens=100))])
        aborting = asyncio.ensure_future(engine.abort("a", "because"))
        await asyncio.sleep(0)
        executor.let(100)
        assert await aborting
        assert not await engine.abort("a")
        deltas = []
        while not generation.finished:
            deltas += [delta for _, delta in await generation.take()]
        return merge_deltas(deltas)

    last = run(engine, work())
    assert (last.finish_reason, last.error) == ("abort", "because")
