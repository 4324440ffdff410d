"""Reads a model's tensors and packs them for the kernels. Knows names and layouts, not the forward pass.

Blocks that the weights dtype holds as they are go to the kernels untouched. Other tensors are dequantised in threads
while the main thread packs; only a few matrices exist in float32 at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from octavo.errors import MemoryBudgetError
from octavo.kernels.ops import F32, U8, Ops, PackedLinear
from octavo.models.config import ModelConfig
from octavo.models.tensor_file import TensorFile
from octavo.models.weight_names import WeightNames

Progress = Callable[[int, int], None]  # bytes of the file that are done, bytes in all

_Number = TypeVar("_Number", np.float32, np.uint8)
_MAX_THREADS = 4
# Blocks that each weights dtype holds as they are; other tensors are read as f32 and rounded.
_KEPT_BLOCKS = {"int8": ("q8_0", "q4_0", "q4_1"), "int4": ("q4_0", "q4_1")}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: F32  # [hidden_size]
    qkv: PackedLinear  # hidden_size -> q | k | v
    q_norm: F32 | None  # [head_dim]
    k_norm: F32 | None  # [head_dim]
    output: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    gate_up: PackedLinear  # hidden_size -> gate | up
    down: PackedLinear  # intermediate_size -> hidden_size


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: PackedLinear  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: F32  # [hidden_size]
    head: PackedLinear  # hidden_size -> vocab_size; the embedding itself where they are tied
    rope_divisors: F32 | None  # [head_dim / 2]

    @property
    def num_bytes(self) -> int:
        """Of everything above, a tied head counted once."""
        total = self.embedding.num_bytes + self.final_norm.nbytes
        if self.head is not self.embedding:
            total += self.head.num_bytes
        for layer in self.layers:
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            total += sum(linear.num_bytes for linear in linears)
            total += sum(norm.nbytes for norm in norms if norm is not None)
        return total


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checked weight file, and how to read it."""

    file: TensorFile
    names: WeightNames
    pairs_interleaved: bool  # rows of q and k pair dimensions 2j and 2j + 1 (GGUF of llama), not j and j + head_dim / 2


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Tensors that lie on top of each other in one packed matrix."""

    names: tuple[str, ...]
    heads: tuple[int, ...] = ()  # heads of the first tensors whose rows are to be un-interleaved
    is_of_vocabulary: bool = False  # the embedding or the head


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A matrix as its file has it."""

    kind: str  # of `Ops.pack_blocks`
    rows: U8  # [num_outputs, bytes of a row]


_Read = tuple[F32 | _Blocks, F32 | None]  # weight and bias


def load_weights(
    source: WeightSource, config: ModelConfig, ops: Ops, weights_dtype: str, progress: Progress | None = None
) -> ModelWeights:
    """Read and pack everything. MemoryBudgetError where memory does not suffice."""
    file, names = source.file, source.names
    total_bytes = sum(header.num_bytes for header in file.tensors.values())
    done_bytes = 0
    packed: dict[str, PackedLinear] = {}
    try:
        for matrix, (weight, bias) in _read_ahead(source.file, _matrices(source, config), weights_dtype):
            packed[matrix.names[0]] = (
                ops.pack_blocks(weight.rows, bias, weight.kind)
                if isinstance(weight, _Blocks)
                else ops.pack_linear(weight, bias, _dtype_of(matrix, weights_dtype))
            )
            done_bytes += sum(file.tensors[f"{name}.weight"].num_bytes for name in matrix.names)
            if progress is not None:
                progress(done_bytes, total_bytes)
        layers = tuple(_layer(source, config, index, packed) for index in range(config.num_layers))
        embedding = packed[names.embedding]
        weights = ModelWeights(
            embedding=embedding,
            layers=layers,
            final_norm=_read(file, f"{names.final_norm}.weight"),
            head=packed.get(names.head, embedding),
            rope_divisors=_rope_divisors(source),
        )
    except MemoryError as error:
        raise MemoryBudgetError(
            f"there is not enough memory for the weights of {file.path} ({total_bytes} bytes as stored); free some, or "
            "choose a smaller model or --weights-dtype int8"
        ) from error
    if progress is not None:
        progress(total_bytes, total_bytes)
    return weights


def _matrices(source: WeightSource, config: ModelConfig) -> Iterator[_Matrix]:
    names = source.names
    yield _Matrix((names.embedding,), is_of_vocabulary=True)
    heads = (config.num_heads, config.num_kv_heads) if source.pairs_interleaved else ()
    for index in range(config.num_layers):
        yield _Matrix(tuple(names.of_layer(index, name) for name in (names.q, names.k, names.v)), heads)
        yield _Matrix((names.of_layer(index, names.output),))
        yield _Matrix(tuple(names.of_layer(index, name) for name in (names.gate, names.up)))
        yield _Matrix((names.of_layer(index, names.down),))
    if not config.tie_word_embeddings:
        yield _Matrix((names.head,), is_of_vocabulary=True)


def _dtype_of(matrix: _Matrix, weights_dtype: str) -> str:
    """Four bits are too few for the vocabulary: every logit passes through it."""
    return "int8" if weights_dtype == "int4" and matrix.is_of_vocabulary else weights_dtype


def _layer(source: WeightSource, config: ModelConfig, index: int, packed: dict[str, PackedLinear]) -> LayerWeights:
    file, names = source.file, source.names

    def norm(name: str) -> F32:
        return _read(file, f"{names.of_layer(index, name)}.weight")

    return LayerWeights(
        attention_norm=norm(names.attention_norm),
        qkv=packed[names.of_layer(index, names.q)],
        q_norm=norm(names.q_norm) if config.q_k_norm else None,
        k_norm=norm(names.k_norm) if config.q_k_norm else None,
        output=packed[names.of_layer(index, names.output)],
        mlp_norm=norm(names.mlp_norm),
        gate_up=packed[names.of_layer(index, names.gate)],
        down=packed[names.of_layer(index, names.down)],
    )


def _rope_divisors(source: WeightSource) -> F32 | None:
    name = f"{source.names.rope_divisors}.weight"
    return _read(source.file, name) if source.names.rope_divisors and name in source.file.tensors else None


def _read_ahead(file: TensorFile, matrices: Iterable[_Matrix], weights_dtype: str) -> Iterator[tuple[_Matrix, _Read]]:
    """Every matrix in order, the next few being read by threads meanwhile."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    pending: deque[tuple[_Matrix, Future[_Read]]] = deque()
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


def _read_matrix(file: TensorFile, matrix: _Matrix, weights_dtype: str) -> _Read:
    """The tensors of a matrix one below the other, and their biases."""
    headers = [file.tensors[f"{name}.weight"] for name in matrix.names]
    kinds = {header.dtype for header in headers}
    kept = kinds.intersection(_KEPT_BLOCKS.get(_dtype_of(matrix, weights_dtype), ()))
    heads = (*matrix.heads, *(0 for _ in matrix.names))[: len(matrix.names)]
    bias = None
    if f"{matrix.names[0]}.bias" in file.tensors:
        bias = _stack([_in_halves(_read(file, f"{name}.bias"), n) for name, n in zip(matrix.names, heads, strict=True)])
    if len(kinds) == len(kept) == 1:
        blocks = [file.raw(header.name).reshape(header.shape[0], -1) for header in headers]
        return _Blocks(headers[0].dtype, _stack([_in_halves(b, n) for b, n in zip(blocks, heads, strict=True)])), bias
    weight = np.empty((sum(header.shape[0] for header in headers), headers[0].shape[1]), np.float32)
    start = 0
    for header, num_heads in zip(headers, heads, strict=True):
        rows = weight[start : start + header.shape[0]]
        if num_heads:
            rows[...] = _in_halves(_read(file, header.name), num_heads)
        else:
            file.read_into(header.name, rows)
        start += header.shape[0]
    return weight, bias


def _in_halves(rows: npt.NDArray[_Number], heads: int) -> npt.NDArray[_Number]:
    """With heads, rows 2j and 2j + 1 of each head become rows j and j + head_dim / 2."""
    if not heads:
        return rows
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _stack(parts: list[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read(file: TensorFile, name: str) -> F32:
    values = np.empty(file.tensors[name].shape, np.float32)
    file.read_into(name, values)
    return values
