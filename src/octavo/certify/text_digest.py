"""How a text is named in what is made from it: scales and certificates."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256


def text_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 in hex of a text as the model reads it."""
    return sha256(b"".join(one.to_bytes(4, "little") for one in token_ids)).hexdigest()
