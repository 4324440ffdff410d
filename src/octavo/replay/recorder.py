"""Records what comes into a core, and the events that come out of it, so that another process can do it again.

Token ids are masked (`token_mask`), requests numbered, namespaces and, unless asked for, texts left out. It is told by
the core (`Journal`, `Listener`) in the engine's thread; it decides nothing, and a disk that fails ends the recording
only.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from octavo.core import events
from octavo.core.engine_core import EngineCore
from octavo.core.request import Request
from octavo.core.step import Row, SampledToken, StepPlan, StepResult
from octavo.replay.event_lines import event_line
from octavo.replay.recorded_text import Decode, RecordedText
from octavo.replay.token_mask import State, TokenMask

VERSION = 1
FIRST_END_ID = 0xFFFFFFFF  # what the first of a request's end tokens is recorded as; the others count down from it
# What decides about blocks and seats; how a token is drawn does not, as the token is recorded.
RECORDED_PARAMS = tuple(
    "max_tokens min_tokens n best_of use_beam_search length_penalty early_stopping logprobs prompt_logprobs "
    "kv_policy".split()
)


class Recorder:
    """To be made before the core begins, and closed when it has ended."""

    def __init__(
        self,
        path: Path,
        core: EngineCore,
        key: bytes,
        clock: Callable[[], float],
        about: dict[str, Any],
        *,
        decode: Decode | None = None,
    ) -> None:
        """decode: makes texts of tokens, to be recorded beside the masked ones; None: no text is.

        Raises OSError where the file cannot be written. A name that ends in .gz is packed.
        """
        self._text = None if decode is None else RecordedText(decode)
        self._mask = TokenMask(key)
        self._clock = clock
        self._start_s = clock()
        self._names: dict[str, str] = {}  # request id -> its name in the recording
        self._numbers = 0
        self._is_planned = False  # a step was decided, and its result is not here yet
        self._planned_s = 0.0
        # Request or branch -> the state before each of its tokens, and after the last one that is known.
        self._states: dict[str, list[State]] = {}
        self._end_ids: dict[str, dict[int, int]] = {}  # request -> its end tokens, as they are recorded
        self.error: str | None = None
        self._out: IO[str] | None = (
            io.TextIOWrapper(gzip.GzipFile(path, "wb"), encoding="utf-8")
            if path.suffix == ".gz"
            else path.open("w", encoding="utf-8")
        )
        blocks = core.scheduler.blocks
        self._write(
            {
                "octavo_record": VERSION,
                "scheduler": asdict(core.scheduler.config),
                "spec": asdict(blocks.spec),
                "num_blocks": blocks.pool.num_blocks,
                "token_exact_hits": blocks.token_exact_hits,
                "about": about,
            }
        )
        core.keep_journal(self)
        core.add_listener(self.heard)

    def close(self) -> None:
        if self._out is not None:
            out, self._out = self._out, None
            out.close()

    # -- what the core tells ---------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        name = self._name(request.request_id)
        before = self._mask.begin(request.namespace)
        ids, states = self._mask.mask_text(before, request.token_ids)
        self._states[request.request_id] = [before, *states]
        ends = {token: FIRST_END_ID - at for at, token in enumerate(sorted(request.stop_token_ids))}
        self._end_ids[request.request_id] = ends
        params = {field: getattr(request.params, field) for field in RECORDED_PARAMS}
        self._write(
            {
                "add": name,
                "t": self._now(),
                "prompt": ids,
                "params": {field: value for field, value in params.items() if value is not None},
                "end_tokens": len(ends),
                "namespace": self._mask.name(request.namespace),
                "priority": request.priority,
                **({} if self._text is None else {"text": self._text.added(request)}),
            }
        )

    def ending(self, request_id: str, finish_reason: str, branch: int | None) -> None:
        if request_id in self._end_ids:  # else there is no such request, and nothing comes of it
            self._write({"end": self._names[request_id], "reason": finish_reason, "branch": branch})

    def planned(self, plan: StepPlan) -> None:
        self._is_planned = bool(plan.rows)
        self._planned_s = self._clock()
        if not plan.rows:
            self._write({"step": plan.step_index})

    def executed(self, plan: StepPlan, result: StepResult) -> None:
        self._is_planned = False
        seconds = round(self._clock() - self._planned_s, 7)
        line: dict[str, Any] = {"step": plan.step_index, "t": self._now(), "s": seconds, "tokens": result.num_tokens}
        sampled: dict[str, Any] = {}
        candidates: dict[str, Any] = {}
        for row in plan.rows:
            states = self._follow(row)
            for drawing in (row.request_id, *(branch.request_id for branch in row.branch_samples)):
                token = result.sampled.get(drawing)
                if token is not None:
                    sampled[self._name(drawing)] = self._token(drawing, states[-1], token)
                    if self._text is not None:
                        self._text.drew(self._root(drawing), drawing, token.token_id)
                if drawing in result.candidates:
                    candidates[self._name(drawing)] = [
                        [self._masked(drawing, states[-1], one.token_id), one.logprob]
                        for one in result.candidates[drawing]
                    ]
        line["sampled"] = sampled
        if candidates:
            line["candidates"] = candidates
        if result.failed:
            line["failed"] = [self._name(one) for one in result.failed]
        self._write(line)

    def failing(self, error: str) -> None:  # noqa: ARG002
        self._write({"fail": True, "in_step": self._is_planned})
        self._is_planned = False

    def resetting(self) -> None:
        self._write({"reset": True})

    def heard(self, event: events.Event) -> None:
        """A listener of the core's events."""
        if isinstance(event, events.RequestForked):
            self._states[event.child_id] = self._states[event.parent_id][:]
        if not isinstance(event, events.RequestAdded):  # told by `added`, before it has a name
            self._write({"event": event_line(event, self._name)})
        if isinstance(event, events.RequestFinished):
            if self._text is not None:
                self._write({"answer": self._name(event.output.request_id), **self._text.ended(event.output)})
            if not event.output.open_branches:
                self._forget(event.output.request_id)

    # -- texts -----------------------------------------------------------------------------------------------------

    def _follow(self, row: Row) -> list[State]:
        """The states of a branch up to the end of a row; what it computed before stays as it was."""
        states = self._states.get(row.request_id)
        if states is None:
            states = self._states[row.request_id] = self._states[self._root(row.request_id)][:]
        del states[row.start + 1 :]
        state = states[-1]
        for token in row.token_ids:
            state = self._mask.extend(state, token)
            states.append(state)
        return states

    def _token(self, name: str, state: State, token: SampledToken) -> Any:
        masked = self._masked(name, state, token.token_id)
        return masked if token.logprob is None else [masked, token.logprob]

    def _masked(self, name: str, state: State, token_id: int) -> int:
        end_id = self._end_ids[self._root(name)].get(token_id)
        return self._mask.mask(state, token_id) if end_id is None else end_id

    # -- names and the file ----------------------------------------------------------------------------------------

    def _name(self, request_id: str) -> str:
        known = self._names.get(request_id)
        if known is not None:
            return known
        root, mark, branch = request_id.rpartition("#")
        if root in self._names:
            return self._names[root] + mark + branch
        known = self._names[request_id] = f"r{self._numbers}"
        self._numbers += 1
        return known

    def _forget(self, request_id: str) -> None:
        """Its id may be another request's from now on."""
        self._names.pop(request_id, None)
        self._end_ids.pop(request_id, None)
        for name in [one for one in self._states if self._root(one) == request_id]:
            del self._states[name]

    def _root(self, name: str) -> str:
        """The request of a branch. Branches are named by the core: the request's id, `#` and a number."""
        return name if name in self._end_ids else name.rpartition("#")[0]

    def _now(self) -> float:
        return round(self._clock() - self._start_s, 6)

    def _write(self, line: dict[str, Any]) -> None:
        if self._out is None:
            return
        try:
            self._out.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self.error = f"the recording ended: {error.strerror or error}"
            self._out = None
