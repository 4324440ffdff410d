"""Bugs that are put in on purpose: tests are worth something if each is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


class SeededBugs:
    """A decorator that keeps the bugs of a file by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Patch] = {}

    def __call__(self, put_in: Patch) -> Patch:
        self.by_name[put_in.__name__] = put_in
        return put_in
