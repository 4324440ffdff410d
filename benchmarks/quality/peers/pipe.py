"""What a worker and the comparison say to each other, over the worker's standard input and output.

The worker first writes one line of JSON (versions and settings); then, for each int32 count and so many int32 token ids
that it reads, the float32 logits [count, vocabulary]. It knows no engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def serve(about: dict[str, Any], logits_of: Callable[[list[int]], Any], out: int) -> None:
    """Until standard input ends. `out` is from `take_output`."""
    with os.fdopen(out, "wb") as writer:
        writer.write((json.dumps(about) + "\n").encode())
        writer.flush()
        while head := sys.stdin.buffer.read(4):
            count = int(np.frombuffer(head, np.int32)[0])
            ids = np.frombuffer(sys.stdin.buffer.read(4 * count), np.int32).tolist()
            logits = np.ascontiguousarray(logits_of(ids), np.float32)
            assert logits.shape[0] == count, logits.shape
            writer.write(logits.tobytes())
            writer.flush()


def take_output() -> int:
    """The standard output, for us alone: what libraries print goes to the standard error. To be called before them."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out
