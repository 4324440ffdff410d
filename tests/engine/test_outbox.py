"""When text leaves the engine: at once where few requests are open, else by the interval, with what cannot wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.outbox import Outbox
from octavo.engine.outputs import GenerationDelta, GenerationRequest
from octavo.errors import ConfigError
from octavo.testing.fake_clock import FakeClock
from tests.engine.engine_case import GatedExecutor, SayingExecutor, new_engine, tiny_tokenizer, tokens_of

MANY = Outbox.FEW_REQUESTS + 1


def test_what_can_wait_is_held_until_the_interval_has_passed() -> None:
    loop = asyncio.new_event_loop()
    got: list[int] = []
    outbox = Outbox(0.5)
    assert not outbox.is_due(MANY, 100.0)  # nothing waits
    outbox.send(100.0)
    outbox.put(loop, got.append, 1, can_wait=True)
    assert not outbox.is_due(MANY, 100.25)
    assert outbox.is_due(MANY - 1, 100.25)  # few readers: nothing is gained by holding
    assert outbox.is_due(MANY, 100.5)
    outbox.put(loop, got.append, 2, can_wait=False)
    assert outbox.is_due(MANY, 100.25)
    outbox.put(loop, got.append, 3, can_wait=True)
    assert outbox.send(100.25) == []
    loop.run_until_complete(asyncio.sleep(0))
    assert got == [1, 2, 3]  # in order, by one callback
    outbox.put(loop, got.append, 4, can_wait=True)
    assert not outbox.is_due(MANY, 100.5)  # what was urgent has left; the interval counts from then
    assert outbox.is_due(MANY, 100.75)
    loop.close()
    assert outbox.send(101.0) == [loop]
    assert got == [1, 2, 3]


@pytest.mark.parametrize(
    ("num_open", "interval_s"), [(MANY, 0.5), (8, 0.5), (16, 1.0), (32, 2.0), (80, 5.0), (1000, 5.0)]
)
def test_many_readers_get_text_as_often_in_all_as_eight(num_open: int, interval_s: float) -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(0.5)
    outbox.send(100.0)
    outbox.put(loop, print, can_wait=True)
    assert not outbox.is_due(num_open, 100.0 + interval_s - 0.25)
    assert outbox.is_due(num_open, 100.0 + interval_s)
    loop.close()


def test_without_an_interval_everything_is_due_at_once() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(0.0)
    outbox.send(7.0)
    outbox.put(loop, print, can_wait=True)
    assert outbox.is_due(1000, 7.0)
    loop.close()


def deltas_of(directory: Path, num_requests: int, interval_ms: float) -> list[list[GenerationDelta]]:
    """Ten tokens for each of several requests; the clock stands still, and every step waits for the readers."""
    executor = GatedExecutor(SayingExecutor("Hello, world."))
    config = EngineConfig(stream_interval_ms=interval_ms)
    engine = new_engine(tiny_tokenizer(directory), executor, config=config, clock=FakeClock(5.0).now)
    found: list[list[GenerationDelta]] = [[] for _ in range(num_requests)]

    requests = [
        GenerationRequest(f"r{number}", tokens_of("Say hello."), SamplingParams(max_tokens=10))
        for number in range(num_requests)
    ]

    async def read() -> None:
        generation = await engine.submit(requests)
        while not generation.finished:
            for number, delta in await generation.take():
                found[number].append(delta)

    async def main() -> None:
        engine.start()
        reader = asyncio.create_task(read())
        while not reader.done():
            stands_still = asyncio.ensure_future(asyncio.to_thread(executor.waiting.acquire))
            await asyncio.wait([stands_still, reader], return_when=asyncio.FIRST_COMPLETED)
            executor.let(1)
        executor.waiting.release()
        await reader
        await engine.shutdown(0)

    asyncio.run(main())
    return found


@pytest.mark.parametrize(("num_requests", "interval_ms"), [(MANY, 20.0), (MANY, 0.0), (MANY - 1, 20.0)])
def test_texts_are_whole_however_they_come(tmp_path: Path, num_requests: int, interval_ms: float) -> None:
    for deltas in deltas_of(tmp_path, num_requests, interval_ms):
        assert "".join(delta.text for delta in deltas) == "Hello, wor"
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_with_many_requests_first_tokens_and_ends_come_and_the_rest_waits(tmp_path: Path) -> None:
    found = deltas_of(tmp_path, MANY, 20.0)
    assert [[len(delta.token_ids) for delta in deltas] for deltas in found] == [[1, 9]] * MANY
    for num_requests, interval_ms in ((MANY, 0.0), (MANY - 1, 20.0)):
        found = deltas_of(tmp_path, num_requests, interval_ms)
        assert [[len(delta.token_ids) for delta in deltas] for deltas in found] == [[1] * 10] * num_requests


@pytest.mark.parametrize("wrong", [-1.0, 10_001.0])
def test_an_interval_out_of_range_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="stream_interval_ms is"):
        EngineConfig(stream_interval_ms=wrong)
