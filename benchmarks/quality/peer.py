"""Another engine in a process and an environment of its own, asked for the logits of token ids (`peers/pipe.py`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from octavo.kernels.ops import F32, I32

WORKERS = {"llama.cpp": "llama_cpp_logits.py", "openvino": "openvino_logits.py"}


class Peer:
    """One engine. `about` is what it says of its versions and settings."""

    def __init__(self, name: str, interpreter: str, model: Path, chunk: int, threads: int) -> None:
        self.name = name
        script = Path(__file__).parent / "peers" / WORKERS[name]
        command = [interpreter, str(script), str(model), str(chunk), str(threads)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=1 << 20
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self.about: dict[str, Any] = json.loads(self._line())

    def logits(self, ids: I32, vocab_size: int) -> F32:
        """[tokens, vocab_size], each from an empty context."""
        self._to.write(np.int32(len(ids)).tobytes() + ids.tobytes())
        self._to.flush()
        data = self._from.read(4 * len(ids) * vocab_size)
        if len(data) < 4 * len(ids) * vocab_size:
            raise RuntimeError(f"{self.name} ended: {self._last_words()}")
        return np.frombuffer(bytearray(data), np.float32).reshape(len(ids), vocab_size)

    def close(self) -> None:
        self._to.close()
        self._process.wait(timeout=60)

    def _line(self) -> bytes:
        line = self._from.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not start: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self._process.wait(timeout=60)
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]
