"""Every request gets exactly one final answer, and every block comes back, whatever ends it and when (law 6, F11)."""

from __future__ import annotations

import asyncio
import random

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest, merge_deltas
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import CapacityError, EngineOverloadedError
from tests.engine.engine_case import NUM_PRINTABLE, checking_executor, new_engine

NUM_BLOCKS = 24


class FailingSometimes:
    """Fails a row now and then, as a row with a NaN would."""

    def __init__(self, seed: int) -> None:
        self._inner = checking_executor()
        self._random = random.Random(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._random.random() < 0.02:
            self._inner.fail_next[self._random.choice(plan.rows).request_id] = "not a number"
        return self._inner.execute(plan)


class Client:
    """Sends requests one after the other and ends some of them in one of several ways."""

    def __init__(self, engine: AsyncEngine, name: str, seed: int) -> None:
        self._engine = engine
        self._name = name
        self._random = random.Random(seed)
        self.ends: list[str] = []

    async def run(self, num_requests: int) -> None:
        for index in range(num_requests):
            self.ends.append(await self._one(f"{self._name}-{index}"))

    async def _one(self, request_id: str) -> str:
        draw = self._random
        prompt = [draw.randrange(NUM_PRINTABLE) for _ in range(draw.choice((1, 15, 16, 17, 40, 70)))]
        if draw.random() < 0.5:
            prompt = [7] * 33 + prompt  # a prefix that many share
        params = SamplingParams(
            max_tokens=draw.choice((1, 2, 9, 40, 400)),
            seed=draw.randrange(5),
            stop=tuple("aeiouAEIOU") if draw.random() < 0.4 else (),
        )
        request = GenerationRequest(request_id, prompt, params, every_token=draw.random() < 0.7)
        how = draw.choice(("read", "read", "close", "cancel", "abort"))
        task = asyncio.ensure_future(self._read(request, close_after=draw.randrange(6) if how == "close" else None))
        if how in ("cancel", "abort"):
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            if how == "cancel":
                task.cancel()
            else:
                await self._engine.abort(request_id)
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"
        except CapacityError:
            return "refused"
        except EngineOverloadedError:
            return "overloaded"

    async def _read(self, request: GenerationRequest, close_after: int | None) -> str:
        generation = await self._engine.submit([request])
        deltas: list[GenerationDelta] = []
        try:
            while not generation.finished:
                if close_after is not None and len(deltas) >= close_after:
                    return "closed"
                deltas += [delta for _, delta in await generation.take()]
        finally:
            generation.close()
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        whole = merge_deltas(deltas)
        assert len(whole.token_ids) == whole.num_output_tokens
        assert (whole.error is not None) == (whole.finish_reason in ("abort", "error"))
        return str(whole.finish_reason)


@pytest.mark.parametrize("seed", range(4))
def test_random_ends(tokenizer: Tokenizer, seed: int) -> None:
    async def main() -> None:
        engine = new_engine(
            tokenizer,
            FailingSometimes(seed),
            config=EngineConfig(max_waiting=8),
            num_blocks=NUM_BLOCKS,
            max_num_seqs=6,
            max_num_batched_tokens=24,
        )
        engine.start()
        clients = [Client(engine, f"client{index}", seed * 100 + index) for index in range(12)]
        await asyncio.gather(*(client.run(20) for client in clients))
        ends = [end for client in clients for end in client.ends]
        assert len(ends) == 12 * 20
        assert {"stop", "length", "abort", "error", "refused"} <= set(ends)
        status = await engine.status()
        assert status.state == "running", status.reason
        core = status.core
        assert (core.running, core.waiting, core.used_blocks) == (0, 0, 0)
        assert core.free_blocks + core.cached_blocks == core.num_blocks == NUM_BLOCKS
        answered = sum(count for _, count in status.finished)
        assert answered == sum(core.finished.values())
        seen = sum(end in ("stop", "length", "abort", "error") for end in ends)
        unseen = sum(end in ("cancelled", "closed") for end in ends)
        assert seen <= answered <= seen + unseen
        assert await engine.shutdown(0) == 0

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_shutdown_amid_it_answers_everybody(tokenizer: Tokenizer, seed: int) -> None:
    async def main() -> None:
        engine = new_engine(tokenizer, num_blocks=NUM_BLOCKS, max_num_seqs=6, max_num_batched_tokens=24)
        engine.start()
        draw = random.Random(seed)
        requests = [
            GenerationRequest(f"{index}", [draw.randrange(NUM_PRINTABLE)] * 20, SamplingParams(max_tokens=200))
            for index in range(20)
        ]
        generation = await engine.submit(requests)
        for _ in range(draw.randrange(50)):
            if not generation.finished:  # a reader that falls behind gets many steps at once
                await generation.take()
        aborted = await engine.shutdown(0, "for the test")
        finals: dict[int, str] = {}
        while not generation.finished:
            for index, delta in await generation.take():
                if delta.finish_reason is not None:
                    assert index not in finals
                    finals[index] = delta.finish_reason
        core = (await engine.status()).core
        assert core.used_blocks == 0
        assert aborted == core.finished["abort"]
        assert set(finals.values()) <= {"abort", "length"}

    asyncio.run(main())
