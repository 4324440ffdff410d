"""How the asynchronous engine fails, stops and idles: every request still gets its answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import (
    EngineStoppedError,
)
from tests.engine.engine_case import (
    PROMPT,
    FailingExecutor,
    GatedExecutor,
    SayingExecutor,
    checking_executor,
    new_core,
    new_engine,
    run,
    whole,
)


def test_a_failure_ends_every_request_once_and_marks_the_engine(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    executor = GatedExecutor(FailingExecutor(checking_executor(), fails_in_step=3))
    engine = new_engine(tokenizer, executor)

    async def work() -> list[GenerationDelta]:
        requests = [GenerationRequest(f"{index}", PROMPT, SamplingParams(max_tokens=50)) for index in range(12)]
        generation = await engine.submit(requests)
        executor.let(3)
        finals = []
        while not generation.finished:
            finals += [delta for _, delta in await generation.take() if delta.finish_reason is not None]
        with pytest.raises(EngineStoppedError, match="on fire"):
            await whole(engine, SamplingParams())
        status = await engine.status()
        assert (status.state, engine.state) == ("failed", "failed")
        assert dict(status.finished)["error"] == 12
        core = status.core
        assert (core.running, core.waiting, core.used_blocks) == (0, 0, 0)
        assert dict(core.finished)["error"] == 12
        with pytest.raises(EngineStoppedError):
            await engine.reset_prefix_cache()
        return finals

    finals = run(engine, work())
    assert len(finals) == 12
    assert {delta.finish_reason for delta in finals} == {"error"}
    assert all("on fire" in (delta.error or "") for delta in finals)
    assert "on fire" in caplog.text


def test_a_request_that_fails_alone_ends_alone(tokenizer: Tokenizer) -> None:
    executor = checking_executor()
    executor.fail_next["a-1"] = "not a number in its logits"
    engine = new_engine(tokenizer, executor)

    async def work() -> dict[int, GenerationDelta]:
        requests = [GenerationRequest(f"a-{index}", PROMPT, SamplingParams(max_tokens=5)) for index in range(3)]
        generation = await engine.submit(requests)
        finals = {}
        while not generation.finished:
            finals |= {index: delta for index, delta in await generation.take() if delta.finish_reason is not None}
        return finals

    finals = run(engine, work())
    assert {index: delta.finish_reason for index, delta in finals.items()} == {0: "length", 1: "error", 2: "length"}
    assert finals[1].error == "not a number in its logits"
    assert engine.state == "stopped"


def test_shutdown_lets_requests_end(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer, SayingExecutor())

    async def work() -> None:
        generation = await engine.submit([GenerationRequest("a", PROMPT, SamplingParams(max_tokens=64))])
        assert await engine.shutdown(60, "for the test") == 0
        assert (await generation.take())[0][1].text == "Hello, world."
        assert generation.finished
        with pytest.raises(EngineStoppedError, match="for the test"):
            await whole(engine, SamplingParams())
        assert (await engine.status()).state == "stopped"

    run(engine, work())


def test_shutdown_aborts_what_does_not_end_and_says_why(tokenizer: Tokenizer) -> None:
    executor = GatedExecutor(checking_executor())
    engine = new_engine(tokenizer, executor)

    async def work() -> GenerationDelta:
        requests = [GenerationRequest(f"{index}", PROMPT, SamplingParams(max_tokens=100)) for index in range(2)]
        generation = await engine.submit(requests)
        stopping = asyncio.ensure_future(engine.shutdown(0.01, "for the test"))
        while engine.state == "running":
            await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="for the test"):
            await whole(engine, SamplingParams())
        await asyncio.sleep(0.02)
        executor.let(1000)
        assert await stopping == 2
        finals = []
        while not generation.finished:
            finals += [delta for _, delta in await generation.take()]
        assert [delta.finish_reason for delta in finals] == ["abort", "abort"]
        return finals[0]

    assert "for the test, and the request did not end within 0.01 s" in (run(engine, work()).error or "")


def test_an_engine_that_was_not_started_says_so(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)

    async def work() -> None:
        with pytest.raises(EngineStoppedError, match=r"start\(\)"):
            await whole(engine, SamplingParams())
        assert await engine.shutdown(1) == 0

    asyncio.run(work())


def test_an_event_loop_that_closes_leaves_no_request_behind(tokenizer: Tokenizer) -> None:
    engine = new_engine(tokenizer)
    engine.start()
    first = asyncio.new_event_loop()
    first.run_until_complete(engine.submit([GenerationRequest("a", PROMPT, SamplingParams(max_tokens=200))]))
    first.close()

    async def work() -> None:
        while (await engine.status()).core.used_blocks:
            await asyncio.sleep(0)
        await whole(engine, SamplingParams(max_tokens=3))

    run(engine, work())


def test_idle_work_is_done_while_there_is_nothing_else_and_between_requests(tokenizer: Tokenizer) -> None:
    left, done, quiet = [3], [0], threading.Event()

    def idle_work() -> bool:
        if not left[0]:
            quiet.set()
            return False
        left[0] -= 1
        done[0] += 1
        return True

    engine = AsyncEngine(new_core(checking_executor()), tokenizer, EngineConfig(), idle_work=idle_work)

    async def work() -> None:
        assert await asyncio.to_thread(quiet.wait, 10)
        assert done[0] == 3
        await whole(engine, SamplingParams(max_tokens=3))
        quiet.clear()
        left[0] = 2
        await whole(engine, SamplingParams(max_tokens=3))
        assert await asyncio.to_thread(quiet.wait, 10)
        assert done[0] == 5

    run(engine, work())


def test_idle_work_without_end_lets_requests_through(tokenizer: Tokenizer) -> None:
    done = [0]

    def idle_work() -> bool:
        done[0] += 1
        return True

    engine = AsyncEngine(new_core(checking_executor()), tokenizer, EngineConfig(), idle_work=idle_work)

    async def work() -> None:
        for _ in range(5):
            await whole(engine, SamplingParams(max_tokens=3))
        before = done[0]
        while done[0] == before:
            await asyncio.sleep(0.001)

    run(engine, work())


def test_idle_work_that_fails_fails_the_engine_with_an_answer_for_everybody(tokenizer: Tokenizer) -> None:
    def idle_work() -> bool:
        raise RuntimeError("no memory is left")

    engine = AsyncEngine(new_core(checking_executor()), tokenizer, EngineConfig(), idle_work=idle_work)

    async def work() -> None:
        while engine.state != "failed":
            await asyncio.sleep(0.001)
        assert "no memory is left" in str(engine.reason)
        with pytest.raises(EngineStoppedError, match="no memory is left"):
            await whole(engine, SamplingParams(max_tokens=3))

    run(engine, work())
