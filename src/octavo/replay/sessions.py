"""Who goes on with which talk, from names of blocks alone. It knows no cache, no time and no text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """Of a request: so many of its first blocks were there before, and so many of these in its own talk."""

    session: int
    known: int
    own: int


class Sessions:
    """A request goes on with a talk when it begins with all of that talk's last prompt, but for the block that was not
    full; or when the trace says so. Memory is in proportion to the different blocks of the trace.
    """

    def __init__(self) -> None:
        self._session_of: dict[Hashable, int] = {}  # block -> the talk that brought it, or went on through it last
        self._length: dict[int, int] = {}  # blocks of the talk's last prompt
        self._named: dict[str, int] = {}

    @property
    def count(self) -> int:
        return len(self._length)

    def add(self, path: Sequence[Hashable], num_prompt: int, name: str = "") -> Repeat:
        """path: blocks of the prompt, and behind them those of the answer; name: of the talk, where there is one."""
        session_of, known = self._session_of, 0
        for block in path[:num_prompt]:
            if block not in session_of:
                break
            known += 1
        session = self._find(path, known, name)
        own = min(known, self._length.get(session, 0))
        for block in path[known:]:
            session_of[block] = session
        if known:
            session_of[path[known - 1]] = session
        self._length[session] = len(path)
        return Repeat(session, known, own)

    def _find(self, path: Sequence[Hashable], known: int, name: str) -> int:
        if name:
            return self._named.setdefault(name, len(self._named))
        if known:
            owner = self._session_of[path[known - 1]]
            if known >= self._length[owner] - 1:
                return owner
        return len(self._length)
