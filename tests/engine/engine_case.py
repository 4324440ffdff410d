"""A small engine for tests: a byte tokenizer, the real core, and executors that need no model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig
from octavo.core.engine_core import EngineCore
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import Executor, SampledToken, StepPlan, StepResult, TokenLogprob
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, merge_deltas
from octavo.engine.tokenizer import Tokenizer
from octavo.testing.checking_executor import CheckingExecutor

BLOCK_SIZE = 16
NUM_PRINTABLE = 95
EOS = 256
VOCAB_SIZE = 258
SPEC = KVSpec((KVGroupSpec("full", (0, 1), 1, 16, "f32"),), BLOCK_SIZE)


# Ids 0 to 94 are printable ASCII; the other bytes follow in their order.
BYTE_OF = tuple(range(32, 32 + NUM_PRINTABLE)) + tuple(range(32)) + tuple(range(32 + NUM_PRINTABLE, 256))
ID_OF = {byte: token_id for token_id, byte in enumerate(BYTE_OF)}


def tiny_tokenizer(directory: Path) -> Tokenizer:
    """One token per byte, <|end|> (EOS) and <|start|>; read from files as a model's own is."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocab = {letters[byte]: token_id for token_id, byte in enumerate(BYTE_OF)}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(["<|end|>", "<|start|>"])
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return Tokenizer.from_directory(directory)


def tokens_of(text: str) -> list[int]:
    """The ids of a text, without a tokenizer."""
    return [ID_OF[byte] for byte in text.encode()]


@dataclass
class SayingExecutor:
    """Every request says the same text, one byte a step, and then ends (or says it again, where its end is banned)."""

    text: str = "Hello, world."
    steps: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        said = [*tokens_of(self.text), EOS]
        result = StepResult({}, num_tokens=plan.num_tokens)
        for row in plan.rows:
            samples = [] if row.sample is None else [(row.request_id, row.sample)]
            for name, sample in (*samples, *((branch.request_id, branch.sample) for branch in row.branch_samples)):
                token_id = said[sample.position % len(said)]
                if token_id in sample.banned_token_ids:
                    token_id = said[0]
                result.sampled[name] = self._scored(token_id, sample.params.logprobs)
        return result

    def _scored(self, token_id: int, logprobs: int | None) -> SampledToken:
        if logprobs is None:
            return SampledToken(token_id)
        others = [other for other in range(logprobs + 1) if other != token_id][: max(logprobs - 1, 0)]
        likely = [TokenLogprob(token_id, -0.25)] + [TokenLogprob(other, -2.0 - other) for other in others]
        return SampledToken(token_id, -0.25, tuple(likely[:logprobs]))


@dataclass
class GatedExecutor:
    """Holds a step back until the test lets it go: `permits` steps may run, `waiting` tells that one stands still."""

    inner: Executor
    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def execute(self, plan: StepPlan) -> StepResult:
        self.waiting.release()
        self.permits.acquire()
        return self.inner.execute(plan)

    def let(self, steps: int) -> None:
        self.permits.release(steps)


@dataclass
class PacedExecutor:
    """Takes its time, so that a test that is kept waiting still meets a request that runs."""

    inner: Executor
    step_s: float = 0.002

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.step_s)
        return self.inner.execute(plan)


@dataclass
class FailingExecutor:
    """Raises in its n-th step, as a broken kernel would."""

    inner: Executor
    fails_in_step: int
    steps: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps >= self.fails_in_step:
            raise RuntimeError("the kernel is on fire")
        return self.inner.execute(plan)


def new_core(executor: Executor, *, num_blocks: int = 64, **limits: int | bool) -> EngineCore:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **limits})
    return EngineCore(Scheduler(config, BlockManager(SPEC, num_blocks)), executor)


def checking_executor() -> CheckingExecutor:
    """Its texts are printable, of any length: it never draws the end token."""
    return CheckingExecutor(BLOCK_SIZE, vocab_size=NUM_PRINTABLE, keep_plans=False)


def new_engine(
    tokenizer: Tokenizer,
    executor: Executor | None = None,
    *,
    config: EngineConfig | None = None,
    clock: Callable[[], float] | None = None,
    num_blocks: int = 64,
    **limits: int | bool,
) -> AsyncEngine:
    """Not started yet."""
    core = new_core(checking_executor() if executor is None else executor, num_blocks=num_blocks, **limits)
    if clock is None:
        return AsyncEngine(core, tokenizer, config)
    return AsyncEngine(core, tokenizer, config, clock=clock)


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(BYTE_OF[token_id] for token_id in token_ids).decode()


PROMPT = tokens_of("A prompt of some length, for a block or two.")


async def whole(engine: AsyncEngine, params: SamplingParams, **options: Any) -> GenerationDelta:
    deltas = [delta async for delta in engine.generate(PROMPT, params, request_id="a", **options)]
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return merge_deltas(deltas)


def run(engine: AsyncEngine, work: Coroutine[Any, Any, Any]) -> Any:
    """Starts the engine, runs the work, shuts down; no request may be left."""

    async def main() -> Any:
        engine.start()
        try:
            return await work
        finally:
            await engine.shutdown(0)

    return asyncio.run(main())
