"""20,000 requests of mixed lengths, a fifth of them aborted: one final answer each, blocks balance, memory is flat."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from octavo.core.engine_core import EngineCore
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampledToken, StepPlan, StepResult
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationRequest
from tests.engine.engine_case import NUM_PRINTABLE, new_core, tiny_tokenizer

NUM_CLIENTS = 50
NUM_BLOCKS = 128


class BalancedExecutor:
    """Draws some letter, and asserts in every step that no block is lost."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.core is not None
        status = self.core.status()
        assert status.free_blocks + status.cached_blocks + status.used_blocks == status.num_blocks
        tokens = {row.request_id: SampledToken((row.start * 7) % NUM_PRINTABLE) for row in plan.rows if row.sample}
        return StepResult(tokens, num_tokens=plan.num_tokens)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def one_client(engine: AsyncEngine, name: int, num_requests: int) -> dict[str, int]:
    draw = random.Random(name)
    ends = {"finished": 0, "aborted": 0}
    for index in range(num_requests):
        prompt = [draw.randrange(4)] * draw.choice((16, 32, 48)) + [
            draw.randrange(90) for _ in range(draw.randrange(1, 30))
        ]
        params = SamplingParams(max_tokens=draw.choice((1, 2, 5, 20)))
        generation = await engine.submit([GenerationRequest(f"{name}-{index}", prompt, params)])
        is_aborted = draw.random() < 0.2
        finals = 0
        while not generation.finished:
            if is_aborted:
                generation.close()
                break
            finals += sum(delta.finish_reason is not None for _, delta in await generation.take())
        assert finals == (0 if is_aborted else 1)
        ends["aborted" if is_aborted else "finished"] += 1
    return ends


def soak(num_requests: int, directory: Path) -> None:
    async def main() -> None:
        executor = BalancedExecutor()
        core = executor.core = new_core(executor, num_blocks=NUM_BLOCKS, max_num_seqs=32)
        engine = AsyncEngine(core, tiny_tokenizer(directory), EngineConfig())
        engine.start()
        part = num_requests // NUM_CLIENTS // 4
        sizes = []
        for quarter in range(4):
            ends = await asyncio.gather(
                *(one_client(engine, 1000 * quarter + name, part) for name in range(NUM_CLIENTS))
            )
            assert sum(end["finished"] + end["aborted"] for end in ends) == part * NUM_CLIENTS
            gc.collect()
            sizes.append(resident_bytes())
        status = await engine.status()
        assert status.state == "running", status.reason
        assert (
            sum(count for _, count in status.finished) == sum(status.core.finished.values()) == part * NUM_CLIENTS * 4
        )
        assert status.core.used_blocks == 0
        growth = sizes[-1] - sizes[1]  # the first quarter fills caches and pools
        assert growth < 8 << 20, f"resident memory grew by {growth} bytes: {sizes}"
        await engine.shutdown(0)

    asyncio.run(main())


def test_a_short_soak(tmp_path: Path) -> None:
    soak(2_000, tmp_path)


@pytest.mark.large
def test_20_000_requests(tmp_path: Path) -> None:
    soak(20_000, tmp_path)
