"""Numbers of bytes, as written and as read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("2GB", 2 * 10**9),
        ("2 GB", 2 * 10**9),
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5k", 512),
        ("1.1MB", 1_100_000),
        ("7b", 7),
        ("3TiB", 3 << 40),
    ],
)
def test_reads_what_people_write(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 parsecs", "-5MiB", "1,5GB", "0", "0.1", "1e9", "1..5G", "9999999TiB", "0x10"]
)
def test_refuses_what_is_no_size_and_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"MiB|byte") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 2**53), st.sampled_from(["", "KB", "MB", "KiB", "MiB", "GiB"]))
def test_whole_numbers_are_exact(count: int, unit: str) -> None:
    factor = {"": 1, "KB": 10**3, "MB": 10**6, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    if count * factor < 2**63:
        assert parse_bytes(f"{count}{unit}") == count * factor
    else:
        with pytest.raises(ValueError):
            parse_bytes(f"{count}{unit}")


def test_formats_in_binary_units() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(512 << 20) == "512.0 MiB"
    assert format_bytes(5 << 40) == "5.0 TiB"
