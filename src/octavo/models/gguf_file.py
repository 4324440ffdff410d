"""A GGUF file: metadata, and tensors that are dequantised as they are read. Knows no model.

Quantised blocks are decoded by the `gguf` package, a piece at a time so that the pieces stay in cache.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.kernels.ops import F32, U8
from octavo.kv_formats import bf16
from octavo.models.gguf_header import TENSOR_TYPES, read_header
from octavo.models.tensor_file import TensorHeader

_PIECE_NUMBERS = 1 << 17  # numbers decoded at a time
_BLOCKS = {name: (numbers, num_bytes) for name, numbers, num_bytes in TENSOR_TYPES.values()}


class GgufFile:
    """Implements `tensor_file.TensorFile`."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._data = map_file(path)
        header = read_header(self._data, self._path)
        self._starts = {name: info.start for name, info in header.tensors.items()}
        self.version = header.version
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = {
            name: TensorHeader(name, info.dtype, info.shape, info.num_bytes) for name, info in header.tensors.items()
        }

    @property
    def path(self) -> str:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return self._tensors

    def raw(self, name: str) -> U8:
        return np.frombuffer(self._data, np.uint8, self._tensors[name].num_bytes, self._starts[name])

    def read_into(self, name: str, out: F32, first: int = 0) -> None:
        header = self._tensors[name]
        assert first + out.size <= math.prod(header.shape), (name, out.shape, first, header.shape)
        check_length(self._data, self._path)
        numbers, num_bytes = _BLOCKS[header.dtype]
        assert first % numbers == 0, (name, first)
        start_block = first // numbers
        blocks = self.raw(name).reshape(-1, num_bytes)[start_block : start_block + out.size // numbers]
        target = out.reshape(-1, numbers)
        decode = _decoder(header.dtype)
        step = max(1, _PIECE_NUMBERS // numbers)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale may be infinite or no number
            for start in range(0, len(blocks), step):
                target[start : start + step] = decode(blocks[start : start + step])


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, read-only, without reading them."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{path} is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error


def check_length(data: mmap.mmap, path: str) -> None:
    """Raises ModelError where a mapped file has been cut since: to read beyond its new end would end the process.

    It is asked before each tensor; a cut within that moment is not caught.
    """
    if data.size() < len(data):
        raise ModelError(
            f"{path} has become shorter while it was read (from {len(data)} bytes to {data.size()}): something else "
            f"writes to it; wait until that is done and load it again"
        )


def _decoder(dtype: str) -> Callable[[U8], F32]:
    """From blocks [n, bytes of a block] to numbers [n, numbers of a block]."""
    if dtype == "f32":
        return lambda blocks: blocks.view("<f4")
    if dtype == "f16":
        return lambda blocks: blocks.view("<f2")
    if dtype == "bf16":
        return lambda blocks: bf16.from_bits(blocks.view("<u2"))
    from gguf import quants  # here, because importing it takes a while and many models do not need it

    decode: Callable[[U8], F32] = getattr(quants, dtype.upper()).dequantize_blocks
    return decode
