"""What a weight file offers, whatever its format: named tensors with shapes, read as float32 a piece at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from octavo.kernels.ops import F32, U8

_SAMPLES_PER_TENSOR = 8
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorHeader:
    name: str
    dtype: str  # "f32", "f16", "bf16", "q4_1" ...
    shape: tuple[int, ...]  # [num_outputs, num_inputs] or [size]
    num_bytes: int


class TensorFile(Protocol):
    """A memory-mapped weight file, or several that belong together. Reading is thread-safe."""

    @property
    def path(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorHeader]: ...

    def raw(self, name: str) -> U8:
        """The stored bytes of a tensor: a view of the file, [num_bytes]."""
        ...

    def read_into(self, name: str, out: F32, first: int = 0) -> None:
        """Fill `out`, C-contiguous, with as many values as it holds, in the order of the file from number `first` on.

        Of quantised tensors, `first` and the size of out are whole blocks.
        """
        ...


def tensors_digest(file: TensorFile) -> hashlib._Hash:
    """SHA-256 over every tensor's name, dtype, shape and samples of its bytes.

    Of a tensor of more than 32 KiB, eight pieces of 4 KiB are read, evenly spread, first and last bytes included:
    reading every byte of a large model would take as long as loading it. Training, merging and quantising change
    the bytes of a tensor everywhere, so that the samples tell such models apart; one edited by hand between the samples
    would not be told apart.
    """
    digest = hashlib.sha256()
    for name in sorted(file.tensors):
        header = file.tensors[name]
        digest.update(
            f"{len(name)}:{name} {header.dtype} {header.shape} {header.num_bytes}\n".encode("utf-8", "surrogatepass")
        )
        raw = file.raw(name)
        if len(raw) <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
            digest.update(raw.data)
            continue
        last = len(raw) - _SAMPLE_BYTES
        for sample in range(_SAMPLES_PER_TENSOR):
            start = last * sample // (_SAMPLES_PER_TENSOR - 1)
            digest.update(raw[start : start + _SAMPLE_BYTES].data)
    return digest
