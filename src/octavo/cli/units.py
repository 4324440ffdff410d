"""Numbers of bytes as people write and read them. It does not know what the bytes are for."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MAX_BYTES = 2**63 - 1
MEBIBYTE = 2**20


def parse_bytes(text: str) -> int:
    """`512MiB`, `2GB`, `1.5G`, `1048576` as bytes: KB, MB, GB count by 1000; KiB, MiB, GiB (and K, M, G) by 1024.

    Raises ValueError, whose message says what is wrong and what may be written.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a number of bytes; write 512MiB, 2GB, 1.5G or a plain number")
    whole, _, fraction = match[1].partition(".")
    num_bytes = int(whole) * unit + int(fraction or "0") * unit // int(10 ** len(fraction))
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise ValueError(f"{text!r} is {num_bytes} bytes; it must be at least 1 byte and below 8 EiB")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """In binary units with one decimal: `512.0 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
