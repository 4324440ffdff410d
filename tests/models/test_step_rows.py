"""Buffers for activations: kept, grown, and made ready between steps."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from octavo.models import step_rows
from octavo.models.decoder import DecoderScratch
from octavo.models.step_rows import Scratch

PART = step_rows._PART_NUMBERS


def resident_pages(numbers: np.ndarray) -> int:
    """Of the pages that lie in the array, those that have memory."""
    first, last = numbers.ctypes.data // 4096 + 1, (numbers.ctypes.data + numbers.nbytes) // 4096
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        return sum(int.from_bytes(file.read(8), "little") >> 63 for _ in range(last - first))


def test_buffers_are_kept_and_grown_and_begin_on_cache_lines() -> None:
    scratch = Scratch()
    few = scratch.rows("x", 3, 5)
    few[:] = 7
    assert scratch.rows("x", 2, 5).tolist() == [[7] * 5] * 2
    assert scratch.rows("x", 64, 5)[:3].tolist() == [[7] * 5] * 3
    assert scratch.rows("x", 65, 5).shape == (65, 5)
    assert scratch.heads("y", 4, 2, 16).shape == (4, 2, 16)
    assert scratch.rows("x", 65, 5).ctypes.data % 64 == 0


@pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists() or PAGESIZE != 4096, reason="the account of pages is Linux's"
)
def test_memory_is_made_ready_a_part_at_a_time() -> None:
    scratch, rows = Scratch(), 5 * PART // 2 // 1024
    parts = 1
    assert scratch.prepare("x", rows, 1024)
    numbers = scratch.rows("x", rows, 1024)
    assert resident_pages(numbers[: PART // 1024]) == PART // 1024 - 1
    assert resident_pages(numbers) < rows - 1, "not all at once, though pages may be huge"
    while scratch.prepare("x", rows, 1024):
        parts += 1
    assert parts == 3
    assert resident_pages(numbers) == rows - 1
    assert not scratch.prepare("x", rows - 1, 1024), "and no more of fewer rows"
    assert scratch.prepare("x", rows + 100, 1024), "of more rows, all of it"


def test_without_memory_nothing_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    scratch = Scratch()
    monkeypatch.setattr(step_rows, "_aligned", fail)
    assert not scratch.prepare("x", 3, 5)


def test_a_decoder_has_hidden_rows_and_heads_ready() -> None:
    scratch = DecoderScratch(hidden_size=PART // 8, num_heads=2, head_dim=PART // 8)
    hidden, heads = scratch.take(3)
    assert (hidden.shape, heads.shape) == ((3, PART // 8), (3, 2, PART // 8))
    parts = 0
    while scratch.prepare(16):
        parts += 1
    assert parts == 2 + 4, "what both have of 16 rows"
    assert not scratch.prepare(3)
