"""A clock that moves only when it is told to. It knows no real time."""

from __future__ import annotations


class FakeClock:
    """Give `clock.now` where a function like `time.monotonic` is wanted."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        assert seconds >= 0, f"a clock cannot go back by {-seconds} s"
        self._now_s += seconds
