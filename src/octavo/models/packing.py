"""Reads the parts of a model and packs them for the kernels. Knows layouts, not families and not the forward pass.

Blocks that the weights dtype holds as they are go to the kernels untouched. Other tensors are dequantised in threads
while the main thread packs; only a few matrices exist in float32 at any time.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from octavo.errors import MemoryBudgetError
from octavo.kernels.ops import F32, U8, Ops, PackedLinear
from octavo.models.parts import Matrix, Parts, Rows, Vector, part_shape
from octavo.models.tensor_file import TensorFile

Progress = Callable[[int, int], None]  # bytes of the file that are done, bytes in all

_Number = TypeVar("_Number", np.float32, np.uint8)
_MAX_THREADS = 4
# Blocks that each weights dtype holds as they are; other tensors are read as f32 and rounded.
_KEPT_BLOCKS = {"int8": ("q8_0", "q4_0", "q4_1"), "int4": ("q4_0", "q4_1")}


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checked weight file, and what to read of it."""

    file: TensorFile
    parts: Parts


@dataclass(frozen=True, slots=True)
class Packed:
    """What was read, by key."""

    matrices: Mapping[str, PackedLinear]
    vectors: Mapping[str, F32]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.matrices.values()) + sum(one.nbytes for one in self.vectors.values())


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A matrix as its file has it."""

    kind: str  # of `Ops.pack_blocks`
    rows: U8  # [num_outputs, bytes of a row]


_Read = tuple[F32 | _Blocks, F32 | None]  # weight and bias


def pack_parts(source: WeightSource, ops: Ops, weights_dtype: str, progress: Progress | None = None) -> Packed:
    """Read and pack everything. MemoryBudgetError where memory does not suffice."""
    file, parts = source.file, source.parts
    total_bytes = sum(header.num_bytes for header in file.tensors.values())
    done_bytes = 0.0
    matrices: dict[str, PackedLinear] = {}
    try:
        for matrix, (weight, bias) in _read_ahead(file, parts.matrices, weights_dtype):
            matrices[matrix.key] = (
                ops.pack_blocks(weight.rows, bias, weight.kind)
                if isinstance(weight, _Blocks)
                else ops.pack_linear(weight, bias, dtype_of(matrix, weights_dtype))
            )
            done_bytes += sum(_share_of_file(file, rows) for rows in matrix.rows)
            if progress is not None:
                progress(min(int(done_bytes), total_bytes), total_bytes)
        vectors = {vector.key: _read_vector(file, vector) for vector in parts.vectors if vector.tensor in file.tensors}
    except MemoryError as error:
        raise MemoryBudgetError(
            f"there is not enough memory for the weights of {file.path} ({total_bytes} bytes as stored); free some, or "
            "choose a smaller model or --weights-dtype int8"
        ) from error
    if progress is not None:
        progress(total_bytes, total_bytes)
    return Packed(matrices, vectors)


def _read_vector(file: TensorFile, vector: Vector) -> F32:
    values = read_tensor(file, vector.tensor)
    if vector.added:
        with np.errstate(invalid="ignore"):  # a damaged file may hold signalling NaNs
            values += np.float32(vector.added)
    return values


def dtype_of(matrix: Matrix, weights_dtype: str) -> str:
    """Four bits are too few for the vocabulary: every logit passes through it."""
    if matrix.dtype is not None:
        return matrix.dtype
    return "int8" if weights_dtype == "int4" and matrix.is_of_vocabulary else weights_dtype


def _share_of_file(file: TensorFile, rows: Rows) -> float:
    return file.tensors[rows.tensor].num_bytes * math.prod(part_shape(rows)) / math.prod(rows.shape)


def _read_ahead(file: TensorFile, matrices: Iterable[Matrix], weights_dtype: str) -> Iterator[tuple[Matrix, _Read]]:
    """Every matrix in order, the next few being read by threads meanwhile."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    pending: deque[tuple[Matrix, Future[_Read]]] = deque()
    with ThreadPoolExecutor(num_threads, "octavo-read") as pool:
        try:
            for matrix in matrices:
                pending.append((matrix, pool.submit(_read_matrix, file, matrix, weights_dtype)))
                if len(pending) > num_threads:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read_matrix(file: TensorFile, matrix: Matrix, weights_dtype: str) -> _Read:
    """The tensors of a matrix one below the other, and their biases."""
    headers = [file.tensors[rows.tensor] for rows in matrix.rows]
    biases = [read_bias(file, rows) for rows in matrix.rows if rows.bias is not None]
    bias = _stack(biases) if biases else None
    kinds = {header.dtype for header in headers}
    kept = kinds.intersection(_KEPT_BLOCKS.get(dtype_of(matrix, weights_dtype), ()))
    if len(kinds) == len(kept) == 1 and all(rows.change is None for rows in matrix.rows):
        blocks = [_in_halves(_blocks_of(file, rows), rows.interleaved_heads) for rows in matrix.rows]
        return _Blocks(headers[0].dtype, _stack(blocks)), bias
    if any(rows.change is not None for rows in matrix.rows):
        return _stack([read_rows(file, rows) for rows in matrix.rows]), bias
    weight = np.empty((sum(part_shape(rows)[0] for rows in matrix.rows), matrix.rows[0].shape[-1]), np.float32)
    start = 0
    for rows in matrix.rows:
        target = weight[start : start + part_shape(rows)[0]]
        if rows.interleaved_heads:
            target[...] = read_rows(file, rows)
        else:
            file.read_into(rows.tensor, target, _first_number(rows))
        start += len(target)
    return weight, bias


def _first_number(rows: Rows) -> int:
    return 0 if rows.part is None else rows.part[0] * rows.shape[-1]


def read_rows(file: TensorFile, rows: Rows) -> F32:
    """[num_outputs, num_inputs], as the forward pass uses them."""
    values = np.empty(part_shape(rows), np.float32)
    file.read_into(rows.tensor, values, _first_number(rows))
    changed = values if rows.change is None else rows.change(values)
    return np.ascontiguousarray(_in_halves(changed, rows.interleaved_heads))


def _blocks_of(file: TensorFile, rows: Rows) -> U8:
    """[num_outputs, bytes of a row]"""
    blocks = file.raw(rows.tensor).reshape(math.prod(rows.shape[:-1]), -1)
    return blocks if rows.part is None else blocks[slice(*rows.part)]


def read_bias(file: TensorFile, rows: Rows) -> F32:
    """[num_outputs]"""
    assert rows.bias is not None
    start, end = rows.bias_part or (0, math.prod(rows.bias_shape))
    values = np.empty(end - start, np.float32)
    file.read_into(rows.bias, values, start)
    if rows.change_bias is not None:
        values = rows.change_bias(values)
    return np.ascontiguousarray(_in_halves(values, rows.interleaved_heads))


def _in_halves(rows: npt.NDArray[_Number], heads: int) -> npt.NDArray[_Number]:
    """With heads, rows 2j and 2j + 1 of each head become rows j and j + head_dim / 2."""
    if not heads:
        return rows
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _stack(parts: list[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_tensor(file: TensorFile, name: str) -> F32:
    values = np.empty(file.tensors[name].shape, np.float32)
    file.read_into(name, values)
    return values
