"""Finds stop strings in streamed text, also where one spans several pieces.

What may still become a stop string is held back, and nothing more. The result does not depend on how the text is cut
into pieces: the stop string whose last character comes first wins; of several that end there, the longest. It knows no
tokens and no requests.
"""

from __future__ import annotations

from octavo.errors import InvalidRequestError


class StopChecker:
    """One request's stop strings. After a match it takes no more text."""

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        """`include`: the stop string itself is part of the text that may be sent."""
        if not all(stop):
            raise InvalidRequestError(f"stop has an empty string at place {stop.index('')}: give text", param="stop")
        self._stops = stop
        self._include = include
        # Invariant: the longest end of the text so far that is a proper beginning of a stop string.
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that was found, if one was."""
        assert not self._matched, "text after a stop string was found"
        text = self._held + text
        found = min(self._ends_in(text), default=None)
        if found is not None:
            end, start = found
            self._held, self._matched = "", True
            return text[: end if self._include else start], text[start:end]
        kept = self._num_held(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string."""
        text, self._held = self._held, ""
        return text

    def _ends_in(self, text: str) -> list[tuple[int, int]]:
        """(end, start) of the first place of each stop string that is there."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        return [(start + len(stop), start) for start, stop in starts if start >= 0]

    def _num_held(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
