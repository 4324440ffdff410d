"""The texts of a recording, where they were asked for: of prompts, and of answers as they end.

It knows no blocks and no file. Told in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.request import Request
from octavo.core.request_output import RequestOutput

Decode = Callable[[Sequence[int]], str]


class RecordedText:
    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._drawn: dict[str, dict[str, list[int]]] = {}  # request -> branch by its core's name -> tokens

    def added(self, request: Request) -> str:
        """The text of the prompt."""
        self._drawn[request.request_id] = {}
        return self._decode(request.token_ids)

    def drew(self, request_id: str, branch: str, token_id: int) -> None:
        drawn = self._drawn.get(request_id)
        if drawn is not None:
            drawn.setdefault(branch, []).append(token_id)

    def ended(self, output: RequestOutput) -> dict[str, Any]:
        """What one branch has said. Of a beam search the core tells the text, as beams take over from each other."""
        request_id, branch = output.request_id, output.branch
        drawn = self._drawn.get(request_id, {})
        found = drawn.pop(request_id if not branch else f"{request_id}#{branch}", [])
        if output.part is not None and output.part.token_ids:
            found = list(output.part.token_ids)
        if not output.open_branches:
            self._drawn.pop(request_id, None)
        return {"branch": branch, "text": self._decode(found)}
