"""One model in this process, asked from the terminal: prompts in, text out as it comes. Ctrl-C ends the answer only.

It does not know where prompts come from or how text is shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest, ScoredToken, merge_deltas

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.status import EngineStatus
    from octavo.llm import LoadedModel

INTERRUPTED = "interrupted"
SHUTDOWN_S = 5.0
MAX_PROMPTS = 1_000_000  # of one command: they wait as long as it takes
TextListener = Callable[[int, str], None]  # (index of the prompt, new text)


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish_reason`: as the engine's, or INTERRUPTED. `first_token_s`, `total_s`: since the prompt was submitted."""

    text: str
    token_ids: tuple[int, ...]
    scored_tokens: tuple[ScoredToken, ...]
    finish_reason: str
    stop_reason: str | int | None
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float
    total_s: float

    @property
    def was_interrupted(self) -> bool:
        return self.finish_reason == INTERRUPTED

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None where there is none."""
        decode_s = self.total_s - self.first_token_s
        return (self.num_output_tokens - 1) / decode_s if self.num_output_tokens > 1 and decode_s > 0 else None


class Session:
    """Owns the engine's thread and an event loop; to be closed, or used in a `with` statement."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = EngineConfig(max_waiting=MAX_PROMPTS, eos_token_ids=loaded.eos_token_ids)
        self._engine = AsyncEngine(loaded.core, loaded.tokenizer, config)
        self._runner = asyncio.Runner()
        self._num_requests = 0

    def __enter__(self) -> Session:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._engine.shutdown(SHUTDOWN_S if kind is None else 0.0))
        self._runner.close()

    def answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_text: TextListener
    ) -> list[Answer]:
        """Answers all prompts at once; `on_text` hears each piece. After Ctrl-C those that were open are INTERRUPTED.

        Raises what the engine raises for a prompt that it cannot take, before any is answered.
        """
        return self._runner.run(self._answer(prompts, params, on_text))

    def status(self) -> EngineStatus:
        return self._runner.run(self._engine.status())

    def reset_prefix_cache(self) -> int:
        return self._runner.run(self._engine.reset_prefix_cache())

    async def _answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], on_text: TextListener
    ) -> list[Answer]:
        first = self._num_requests
        self._num_requests += len(prompts)
        requests = [
            GenerationRequest(f"cli-{number}", token_ids, wanted)
            for number, (token_ids, wanted) in enumerate(zip(prompts, params, strict=True), first)
        ]
        start_s = time.perf_counter()
        deltas: list[list[GenerationDelta]] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        generation = await self._engine.submit(requests)
        try:
            while not generation.finished:
                for index, delta in await generation.take():
                    deltas[index].append(delta)
                    times[index].append(time.perf_counter() - start_s)
                    if delta.text:
                        on_text(index, delta.text)
        except asyncio.CancelledError:
            pass  # Ctrl-C; what has come so far is the answer
        finally:
            generation.close()
        now_s = time.perf_counter() - start_s
        parts = zip(requests, deltas, times, strict=True)
        return [_answer_of(request, of_it, at_s, now_s) for request, of_it, at_s in parts]


def _answer_of(request: GenerationRequest, deltas: list[GenerationDelta], times_s: list[float], now_s: float) -> Answer:
    if not deltas:
        return Answer("", (), (), INTERRUPTED, None, None, len(request.prompt_token_ids), 0, 0, now_s, now_s)
    whole = merge_deltas(deltas)
    return Answer(
        text=whole.text,
        token_ids=whole.token_ids,
        scored_tokens=whole.scored_tokens,
        finish_reason=whole.finish_reason or INTERRUPTED,
        stop_reason=whole.stop_reason,
        error=whole.error,
        num_prompt_tokens=whole.num_prompt_tokens,
        num_cached_tokens=whole.num_cached_tokens,
        num_output_tokens=whole.num_output_tokens,
        first_token_s=times_s[0],
        total_s=times_s[-1],
    )
