"""The engine for asyncio: submit requests, read what they generate, abort, ask for the status, shut down.

The event loop never waits for the model: all work happens in the engine's own thread. It does not know HTTP, keys or
chat formats.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from octavo.core.cache_curve import CacheCurve, CurveSource
from octavo.core.engine_core import EngineCore
from octavo.core.sampling_params import MAX_SEED, SamplingParams
from octavo.core.sharing import BranchMemory
from octavo.engine.commands import (
    Abort,
    AbortAll,
    Command,
    Drain,
    GetBranchMemory,
    GetCurve,
    GetStatus,
    MemoryListener,
    ResetPrefixCache,
    Stop,
    Submit,
)
from octavo.engine.config import EngineConfig
from octavo.engine.engine_loop import EngineLoop
from octavo.engine.inbox import Inbox
from octavo.engine.open_request import OpenRequest
from octavo.engine.outputs import GenerationDelta, GenerationRequest
from octavo.engine.status import EngineMeter, EngineStatus
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import EngineStoppedError

Result = TypeVar("Result")

STOP_JOIN_S = 30.0  # a step that takes longer than this when the engine is told to stop is given up on


class Generation:
    """Requests that were admitted together and are read together. Closing it aborts those that are still open."""

    def __init__(self, engine: EngineLoop, inbox: Inbox, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._request_ids = tuple(request_ids)
        self._unfinished = set(range(len(request_ids)))

    @property
    def finished(self) -> bool:
        return not self._unfinished

    async def take(self) -> list[tuple[int, GenerationDelta]]:
        """The next deltas, each with the index of its request; those of a request's branches are told apart by
        `delta.branch`. Call it only while not `finished`.
        """
        taken = await self._inbox.take()
        for index, delta in taken:
            if delta.finish_reason is not None and not delta.open_branches:
                self._unfinished.discard(index)
        return taken

    def close(self) -> None:
        if not self._unfinished:
            return
        left = tuple(self._request_ids[index] for index in sorted(self._unfinished))
        self._unfinished.clear()
        with suppress(EngineStoppedError):  # then they have ended already
            self._engine.post(Abort(left, "the client no longer reads the answer", inbox=self._inbox))


class AsyncEngine:
    """Owns the core from `start` to the end of `shutdown`."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
        curve: CurveSource | None = None,
        idle_work: Callable[[], bool] | None = None,
    ) -> None:
        """`curve` is called in the engine's thread, between steps.

        So is `idle_work`, again and again while there is nothing else to do, until it returns False; a call should take
        less time than a step.
        """
        self.tokenizer = tokenizer
        self._config = EngineConfig() if config is None else config
        self._clock = clock
        self._random_bytes = random_bytes
        eos = self._config.eos_token_ids
        self._loop = EngineLoop(
            core,
            EngineMeter(clock),
            max_waiting=self._config.max_waiting,
            stream_interval_s=self._config.stream_interval_ms / 1e3,
            eos_token_ids=tuple(tokenizer.eos_token_ids) if eos is None else eos,
            curve=curve,
            idle_work=idle_work,
        )
        self._started = False
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-text")

    @property
    def state(self) -> str:
        """ "running", "draining", "stopped" or "failed"; `reason` says why it is not running."""
        return self._loop.state

    @property
    def reason(self) -> str | None:
        return self._loop.reason

    def start(self) -> None:
        """Starts the engine's thread; a second call changes nothing."""
        if not self._started:
            self._started = True
            self._text_thread.submit(self.tokenizer.prepare)
            self._loop.start()

    async def submit(
        self, requests: Sequence[GenerationRequest], *, on_memory: MemoryListener | None = None
    ) -> Generation:
        """Admits all of them or none. `on_memory` hears after each step what those hold that have several branches.

        Raises CapacityError for one that can never fit, EngineOverloadedError when the queue is full and
        EngineStoppedError when the engine takes no requests.
        """
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        replies: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        generation = Generation(self._loop, inbox, [request.request_id for request in requests])
        admitted = False
        try:
            opened = [self._open(request) for request in requests]
            self._post(
                *(
                    Submit(one, inbox, at, reply, on_memory)
                    for at, (one, reply) in enumerate(zip(opened, replies, strict=True))
                )
            )
            results = await asyncio.gather(*replies, return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
            admitted = True
        finally:
            if not admitted:
                generation.close()
                for reply in replies:
                    reply.cancel()  # nobody reads them any more
        return generation

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        namespace: str = "",
        priority: int = 0,
    ) -> AsyncIterator[GenerationDelta]:
        """One answer, delta by delta; the last has a `finish_reason`. Of n answers each `branch` has its own.

        Closing the iterator aborts the request.
        """
        request = GenerationRequest(request_id, prompt_token_ids, params, namespace, priority)
        generation = await self.submit([request])
        try:
            while not generation.finished:
                for _, delta in await generation.take():
                    yield delta
        finally:
            generation.close()

    async def abort(self, request_id: str, reason: str = "aborted by request") -> bool:
        """Ends a request in any state; its reader gets a final delta "abort". False when it is not open."""
        ended: int = await self._ask(lambda reply: Abort((request_id,), reason, reply))
        return ended == 1

    async def abort_all(self, reason: str) -> int:
        """Ends every open request; how many that were."""
        return await self._ask(lambda reply: AbortAll(reason, reply))

    async def status(self) -> EngineStatus:
        """As of the end of the step that runs now; the last known one once the engine has ended."""
        try:
            return await self._ask(GetStatus)
        except EngineStoppedError:
            return self._loop.last_status

    async def branch_memory(self, request_id: str | None = None) -> tuple[BranchMemory, ...]:
        """What the branches of requests that have several hold now: of one request, or of all."""
        return await self._ask(lambda reply: GetBranchMemory(request_id, reply))

    async def cache_curve(self) -> CacheCurve | None:
        """What caches of other sizes would hit; None where nobody estimates it."""
        return await self._ask(GetCurve)

    async def reset_prefix_cache(self) -> int:
        """Drops every cached block that no request uses; how many that were."""
        return await self._ask(ResetPrefixCache)

    async def with_text(self, num_characters: int, work: Callable[[], Result]) -> Result:
        """Runs work on a text (a template, the tokenizer): at once when it is short, else beside the event loop."""
        if num_characters <= self._config.inline_characters:
            return work()
        if self.state in ("stopped", "failed"):  # the thread may be gone with the engine
            raise EngineStoppedError(f"the engine takes no requests: {self.reason}")
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    async def encode(self, text: str, *, add_special_tokens: bool = True, namespace: str | None = None) -> list[int]:
        """As `Tokenizer.encode`."""
        encode = self.tokenizer.encode
        return await self.with_text(len(text), lambda: encode(text, add_special_tokens, namespace=namespace))

    async def shutdown(self, timeout_s: float, reason: str = "it is shutting down") -> int:
        """Takes no more requests, lets the open ones end within `timeout_s`, aborts the rest; how many were aborted."""
        self._loop.stop_admitting(reason)
        self.start()
        aborted = 0
        try:
            try:
                await asyncio.wait_for(self._ask(Drain), timeout_s)
            except TimeoutError:
                why = f"aborted: {reason}, and the request did not end within {timeout_s:g} s"
                aborted = await self._ask(lambda reply: AbortAll(why, reply))
            self._loop.post(Stop(reason))
        except EngineStoppedError:
            pass  # it had ended before
        ended = await asyncio.to_thread(self._loop.join, STOP_JOIN_S)
        self._text_thread.shutdown(wait=False)
        if not ended:
            raise EngineStoppedError(
                f"the engine's last step did not end within {STOP_JOIN_S:g} s; its thread is left behind"
            )
        return aborted

    def _open(self, request: GenerationRequest) -> OpenRequest:
        seed = request.params.seed
        if seed is None:
            seed = int.from_bytes(self._random_bytes(8), "little") & MAX_SEED
        prompt = request.prompt_token_ids
        return OpenRequest(request, lambda: self.tokenizer.new_detokenizer(prompt), seed, self._clock())

    async def _ask(self, command: Callable[[asyncio.Future[Result]], Command]) -> Result:
        reply: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._post(command(reply))
        return await reply

    def _post(self, *commands: Command) -> None:
        if not self._started:
            raise EngineStoppedError("the engine has not been started: call start() first")
        self._loop.post(*commands)
