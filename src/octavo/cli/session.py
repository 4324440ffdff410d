"""One model in this process, asked from the terminal: prompts in, text out as it comes. Ctrl-C ends the answer only.

It does not know where prompts come from or how text is shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.engine.outputs import GenerationDelta, GenerationRequest, ScoredToken, merge_deltas

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.sharing import BranchMemory, Sharing
    from octavo.engine.status import EngineStatus
    from octavo.llm import LoadedModel

INTERRUPTED = "interrupted"
SHUTDOWN_S = 5.0
MAX_PROMPTS = 1_000_000  # of one command: they wait as long as it takes
TextListener = Callable[[int, str], None]  # (index of the prompt, new text)
MemoryListener = Callable[["tuple[BranchMemory, ...]"], None]


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
    score: float | None = None  # what the answers were chosen by, where there were more branches than answers
    num_generated_tokens: int = 0  # by all branches of the prompt; with its first answer only
    sharing: Sharing | None = None  # of the branches of the prompt; with its first answer only
    others: tuple[Answer, ...] = ()  # with the first answer: the prompt's further ones

    @property
    def all(self) -> tuple[Answer, ...]:
        """Every answer to the prompt."""
        return (self, *self.others)

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
        self._engine = AsyncEngine(loaded.core, loaded.tokenizer, config, idle_work=loaded.idle_work)
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
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        on_text: TextListener,
        on_memory: MemoryListener | None = None,
    ) -> list[Answer]:
        """Answers all prompts at once; `on_text` hears each piece. After Ctrl-C those that were open are INTERRUPTED.

        `on_memory` hears after each step what the branches of prompts that have several hold. Raises what the
        engine raises for a prompt that it cannot take, before any is answered.
        """
        return self._runner.run(self._answer(prompts, params, on_text, on_memory))

    def status(self) -> EngineStatus:
        return self._runner.run(self._engine.status())

    def reset_prefix_cache(self) -> int:
        return self._runner.run(self._engine.reset_prefix_cache())

    async def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        on_text: TextListener,
        on_memory: MemoryListener | None,
    ) -> list[Answer]:
        first = self._num_requests
        self._num_requests += len(prompts)
        requests = [
            GenerationRequest(f"cli-{number}", token_ids, wanted)
            for number, (token_ids, wanted) in enumerate(zip(prompts, params, strict=True), first)
        ]
        start_s = time.perf_counter()
        heard = [[_Heard() for _ in range(request.params.n)] for request in requests]
        generation = await self._engine.submit(requests, on_memory=on_memory)
        try:
            while not generation.finished:
                for index, delta in await generation.take():
                    heard[index][delta.branch].add(delta, time.perf_counter() - start_s)
                    if delta.text:
                        on_text(index, delta.text)
        except asyncio.CancelledError:
            pass  # Ctrl-C; what has come so far is the answer
        finally:
            generation.close()
        now_s = time.perf_counter() - start_s
        return [_answers_of(request, of_it, now_s) for request, of_it in zip(requests, heard, strict=True)]


class _Heard:
    """What one answer has so far, and when it came."""

    def __init__(self) -> None:
        self.deltas: list[GenerationDelta] = []
        self.times_s: list[float] = []

    def add(self, delta: GenerationDelta, at_s: float) -> None:
        self.deltas.append(delta)
        self.times_s.append(at_s)


def _answers_of(request: GenerationRequest, heard: list[_Heard], now_s: float) -> Answer:
    """The first answer of a prompt, which holds the others."""
    first, *others = [_answer_of(request, one, now_s) for one in heard]
    deltas = [delta for one in heard for delta in one.deltas]
    return replace(
        first,
        num_generated_tokens=max((delta.num_generated_tokens for delta in deltas), default=0),
        sharing=next((delta.sharing for delta in deltas if delta.sharing is not None), None),
        others=tuple(others),
    )


def _answer_of(request: GenerationRequest, heard: _Heard, now_s: float) -> Answer:
    if not heard.deltas:
        return Answer("", (), (), INTERRUPTED, None, None, len(request.prompt_token_ids), 0, 0, now_s, now_s)
    whole = merge_deltas(heard.deltas)
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
        first_token_s=heard.times_s[0],
        total_s=heard.times_s[-1],
        score=whole.score,
    )
