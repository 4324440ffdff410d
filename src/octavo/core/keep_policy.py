"""Which tokens of a text are kept: what every policy says of itself and of a request, and the policies by name.

A policy drops when a text has a certain number of computed tokens, and no row goes beyond that: so what a token reads
depends on its place in the text alone. What is dropped differs: `streaming` by position, the others by attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.selection import SelectionPlan
from octavo.core.snap_kv import SnapKV
from octavo.core.streaming import DropPlan, StreamingLLM
from octavo.errors import InvalidRequestError

Drops = DropPlan | SelectionPlan


class KeepPolicy(Protocol):
    """Frozen and comparable; `str` gives the text that `parse_policy` reads."""

    def loss(self, block_size: int) -> str:
        """What it takes from the prefix cache, as a sentence."""
        ...

    def most_slots(self, block_size: int) -> int | None:
        """Tokens that a text of any length keeps at most, at any time; None: it may be all of a prompt."""
        ...

    def plan(self, block_size: int, num_prompt_tokens: int = 0, most_tokens: int | None = None) -> Drops | None:
        """What is dropped of a text of which at most so many tokens are computed (None: any number); None: nothing."""
        ...


def chooses(keep: KeepPolicy) -> bool:
    """Whether attention decides what stays."""
    return not isinstance(keep, StreamingLLM)


_POLICIES: dict[str, tuple[Callable[..., KeepPolicy], str]] = {
    "streaming": (StreamingLLM, "streaming:SINKS,RECENT,PIECE"),
    "h2o": (HeavyHitters, "h2o:BUDGET,RECENT,PIECE"),
    "snapkv": (SnapKV, "snapkv:BUDGET,WINDOW,KERNEL"),
}


def parse_policy(text: str) -> KeepPolicy | None:
    """`all` (None), or a name with up to three numbers: `streaming:4,1024,256`. Raises ValueError with the range."""
    name, colon, numbers = text.partition(":")
    if text == "all":
        return None
    parts = numbers.split(",") if colon else []
    if name not in _POLICIES or len(parts) > 3 or not all(part.isdigit() and int(part) for part in parts):
        forms = ", ".join(form for _, form in _POLICIES.values())
        raise ValueError(
            f"kv_policy is {text!r}; it must be all, one of {', '.join(_POLICIES)}, or one with numbers from 1 on: "
            f"{forms}, like streaming:4,1024,256"
        )
    try:
        return _POLICIES[name][0](*[int(part) for part in parts])
    except InvalidRequestError as error:
        raise ValueError(f"kv_policy is {text!r}; {error}") from error
