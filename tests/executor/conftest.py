"""Fixtures of the executor's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def resident_bytes() -> Callable[[], int]:
    """Reads the bytes of this process that lie in memory now."""

    def read() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    return read
