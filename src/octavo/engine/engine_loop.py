"""The one thread that owns the core: takes commands, steps, turns tokens into text and sends it to the event loops.

It does not know HTTP, nor how text becomes tokens. Nobody else touches the core while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from octavo.core.cache_curve import CurveSource
from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.engine.commands import (
    Abort,
    AbortAll,
    Command,
    Drain,
    GetBranchMemory,
    GetCurve,
    GetStatus,
    ResetPrefixCache,
    Stop,
    Submit,
)
from octavo.engine.open_request import OpenRequest
from octavo.engine.outbox import Outbox
from octavo.engine.outputs import GenerationDelta
from octavo.engine.status import EngineMeter, EngineStatus
from octavo.errors import EngineOverloadedError, EngineStoppedError, InvalidRequestError, OctavoError

log = logging.getLogger("octavo.engine")

_IDLE_PAUSE_S = 0.004  # before each part of idle work


class EngineLoop:
    """Commands go in through `post`, deltas and replies go out between steps (outbox.py)."""

    def __init__(
        self,
        core: EngineCore,
        meter: EngineMeter,
        *,
        max_waiting: int,
        stream_interval_s: float,
        eos_token_ids: tuple[int, ...],
        curve: CurveSource | None = None,
        idle_work: Callable[[], bool] | None = None,
    ) -> None:
        self._core = core
        self._idle_work = idle_work
        self._curve = curve
        self._meter = meter
        self._max_waiting = max_waiting
        self._eos_token_ids = eos_token_ids
        self._wakeup = threading.Condition()  # guards the three below
        self._commands: deque[Command] = deque()
        self._state = "running"
        self._reason: str | None = None
        self._open: dict[str, Submit] = {}  # Invariant: a request leaves it exactly when its final delta is sent
        self._watched: dict[str, Submit] = {}  # those of them whose memory is to be told
        # Ends that this loop has told already, and that the core tells with its next step: id -> how many. By then the
        # same id may be another request's.
        self._told_ends: Counter[str] = Counter()
        self._drains: list[asyncio.Future[None]] = []
        self._outbox = Outbox(stream_interval_s)
        self._stop_reason: str | None = None
        self._last_core = core.status()
        self._last_status = meter.status("running", None, self._last_core)
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # -- for other threads -------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._state

    @property
    def reason(self) -> str | None:
        return self._reason

    @property
    def last_status(self) -> EngineStatus:
        """The newest that was taken; once the loop has ended it stays true."""
        return self._last_status

    def start(self) -> None:
        self._thread.start()

    def post(self, *commands: Command) -> None:
        """All are taken before the same step.

        Raises EngineStoppedError when the loop has ended, or takes no more requests and there is one among them.
        """
        is_new = any(isinstance(command, Submit) for command in commands)
        with self._wakeup:
            if self._state in ("stopped", "failed") or (self._state == "draining" and is_new):
                raise EngineStoppedError(f"the engine takes no requests: {self._reason}")
            self._commands.extend(commands)
            self._wakeup.notify()

    def stop_admitting(self, reason: str) -> None:
        with self._wakeup:
            if self._state == "running":
                self._state, self._reason = "draining", reason

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._stop_reason is None:
                for command in self._take_commands():
                    self._handle(command)
                self._send_due()  # replies do not wait for the step
                if self._core.has_work and self._stop_reason is None:
                    self._step()
                    self._send_due()
            self._last_core = self._core.status()
            self._close("stopped", self._stop_reason)
        except Exception as error:  # the border of the engine: every open request still gets its answer
            log.exception("the engine failed; it takes no more requests")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._end_core(reason)
            self._close("failed", reason)

    def _take_commands(self) -> list[Command]:
        """Sleeps while there is nothing to do."""
        while self._idle_work and self._nothing_comes() and self._idle_work():
            pass
        with self._wakeup:
            while not self._commands and not self._core.has_work:
                self._wakeup.wait()
            taken = list(self._commands)
            self._commands.clear()
        return taken

    def _nothing_comes(self) -> bool:
        """Waits for it: idle work may hold Python's lock, and a request that is on its way needs it several times."""
        if self._core.has_work:
            return False
        with self._wakeup:
            return not self._wakeup.wait_for(lambda: bool(self._commands), _IDLE_PAUSE_S)

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._admit(command)
            case Abort(request_ids, reason, reply, inbox):
                named = [self._open[request_id] for request_id in request_ids if request_id in self._open]
                opened = [submit for submit in named if inbox is None or submit.inbox is inbox]
                self._abort(opened, reason)
                if reply is not None:
                    self._answer(reply, len(opened))
            case AbortAll(reason, reply):
                opened = list(self._open.values())
                self._abort(opened, reason)
                self._answer(reply, len(opened))
            case GetStatus(reply):
                self._last_core = self._core.status()
                self._last_status = self._meter.status(self._state, self._reason, self._last_core)
                self._answer(reply, self._last_status)
            case ResetPrefixCache(reply):
                self._answer(reply, self._core.reset_prefix_cache())
            case GetBranchMemory(request_id, reply):
                self._answer(reply, self._core.branch_memory(request_id))
            case GetCurve(reply):
                self._answer(reply, None if self._curve is None else self._curve())
            case Drain(reply):
                self._drains.append(reply)
                self._answer_drains()
            case Stop(reason):
                self._stop_reason = reason

    def _admit(self, submit: Submit) -> None:
        opened, request = submit.opened, submit.opened.request
        try:
            if request.request_id in self._open:
                raise InvalidRequestError(f"a request with the id {request.request_id!r} is already running")
            if len(self._open) >= self._max_waiting and self._core.status().waiting >= self._max_waiting:
                raise EngineOverloadedError(
                    f"{self._max_waiting} requests wait already, as many as max_waiting allows; send it again later"
                )
            self._core.add(
                Request(
                    request.request_id,
                    request.prompt_token_ids,
                    request.params,
                    seed=opened.seed,
                    eos_token_ids=self._eos_token_ids,
                    namespace=request.namespace,
                    priority=request.priority,
                )
            )
        except OctavoError as error:
            self._meter.refused()
            self._answer(submit.reply, error)
            return
        self._open[request.request_id] = submit
        if submit.on_memory is not None:
            self._watched[request.request_id] = submit
        self._answer(submit.reply, None)

    def _step(self) -> None:
        outputs = self._core.step()  # those that were ended from outside come first
        self._tell_memory()
        told, self._told_ends = self._told_ends, Counter()
        now = self._meter.now()
        for output in outputs:
            if output.finish_reason is not None and told[output.request_id]:
                told[output.request_id] -= 1
                continue
            submit = self._open.get(output.request_id)
            if submit is not None:
                self._push(submit, output, now)

    def _tell_memory(self) -> None:
        for submit in self._watched.values():
            memory = self._core.branch_memory(submit.opened.request.request_id)
            if memory and memory[0].blocks and submit.on_memory is not None:
                self._outbox.put(submit.inbox.loop, submit.on_memory, memory, can_wait=True)

    def _push(self, submit: Submit, output: RequestOutput, now: float) -> None:
        opened = submit.opened
        if output.token is not None or output.token_ids:
            self._time_token(opened, output.branch, now)
        deltas, is_stopped = opened.push(output)
        if is_stopped:
            # A stop string: only the text knows it.
            self._told_ends[output.request_id] += self._core.finish(output.request_id, output.branch)
        self._send(submit, deltas, now)

    def _time_token(self, opened: OpenRequest, number: int, now: float) -> None:
        branch = opened.branch(number)
        if branch.is_finished:
            return
        if branch.last_token_s is not None:
            self._meter.next_token(now - branch.last_token_s)
        elif number == 0:
            self._meter.first_token(now - opened.arrived_s)
        branch.last_token_s = now

    def _abort(self, submits: list[Submit], reason: str) -> None:
        now = self._meter.now()
        for submit in submits:
            self._abort_in_core(submit)
            self._send(submit, submit.opened.end("abort", reason), now)

    def _abort_in_core(self, submit: Submit) -> None:
        request_id = submit.opened.request.request_id
        if self._core.abort(request_id):
            self._told_ends[request_id] += submit.opened.num_open

    def _send(self, submit: Submit, deltas: list[GenerationDelta], now: float) -> None:
        for delta in deltas:
            can_wait = (
                delta.finish_reason is None and delta.num_output_tokens > 1
            )  # the first token does not, nor the end
            self._outbox.put(submit.inbox.loop, submit.inbox.put, submit.index, delta, can_wait=can_wait)
            if delta.finish_reason is not None:
                self._meter.finished(delta, now - submit.opened.arrived_s)
        if submit.opened.is_finished:
            del self._open[submit.opened.request.request_id]
            self._watched.pop(submit.opened.request.request_id, None)
            self._answer_drains()

    def _answer(self, reply: asyncio.Future[Any], value: object) -> None:
        self._outbox.put(reply.get_loop(), _resolve, reply, value, can_wait=False)

    def _answer_drains(self) -> None:
        if not self._open:
            for reply in self._drains:
                self._answer(reply, None)
            self._drains.clear()

    def _send_due(self) -> None:
        # Without work there is no next step that could take along what is held.
        if not self._core.has_work or self._outbox.is_due(len(self._open), self._meter.now()):
            self._send_all()

    def _send_all(self) -> None:
        for loop in self._outbox.send(self._meter.now()):
            gone = [submit for submit in self._open.values() if submit.inbox.loop is loop]
            for submit in gone:
                self._abort_in_core(submit)
                del self._open[submit.opened.request.request_id]
                self._watched.pop(submit.opened.request.request_id, None)

    def _close(self, state: str, reason: str) -> None:
        """Answers everything that is open or was still to be read. After it nothing is accepted."""
        with self._wakeup:
            self._state, self._reason = state, reason
            left = list(self._commands)
            self._commands.clear()
        now = self._meter.now()
        for submit in list(self._open.values()):
            self._send(submit, submit.opened.give_up("error" if state == "failed" else "abort", reason), now)
        self._last_status = self._meter.status(state, reason, self._last_core)
        for command in left:
            reply = getattr(command, "reply", None)
            if reply is not None:
                self._answer(reply, EngineStoppedError(reason))
        self._answer_drains()
        self._send_all()

    def _end_core(self, reason: str) -> None:
        """Ends what the core still runs and takes its last status. One that cannot even do that is left as it is."""
        try:
            self._core.fail_all(reason)
            self._last_core = self._core.status()
        except Exception:
            log.exception("the core could not end its requests; its last status stands")


def _resolve(reply: asyncio.Future[Any], value: object) -> None:
    if reply.done():  # cancelled: who asked is gone
        return
    if isinstance(value, Exception):
        reply.set_exception(value)
    else:
        reply.set_result(value)
