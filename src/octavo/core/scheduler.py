"""Placeholder: see the signatures; being written."""

from __future__ import annotations

from octavo.core.events import Listener
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.core.status import CoreStatus
from octavo.core.step import StepPlan, StepResult


class Scheduler:
    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def add(self, request: Request) -> None:
        raise NotImplementedError

    def end(self, request_id: str, finish_reason: str) -> bool:
        raise NotImplementedError

    def end_all(self, finish_reason: str, error: str | None) -> None:
        raise NotImplementedError

    def take_ended(self) -> list[RequestOutput]:
        raise NotImplementedError

    def schedule(self) -> StepPlan:
        raise NotImplementedError

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        raise NotImplementedError

    def status(self) -> CoreStatus:
        raise NotImplementedError

    def reset_prefix_cache(self) -> int:
        raise NotImplementedError

    def add_listener(self, listener: Listener) -> None:
        raise NotImplementedError
