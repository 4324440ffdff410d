"""Reads a model's tensors and packs them for the kernels. Knows names and layouts, not the forward pass.

Tensors are dequantised in threads while the main thread packs; only a few matrices exist in float32 at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from octavo.errors import MemoryBudgetError
from octavo.kernels.ops import F32, Ops, PackedLinear
from octavo.models.config import ModelConfig
from octavo.models.tensor_file import TensorFile
from octavo.models.weight_names import WeightNames

Progress = Callable[[int, int], None]  # bytes of the file that are done, bytes in all

_MAX_THREADS = 4


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


def load_weights(
    source: WeightSource, config: ModelConfig, ops: Ops, weights_dtype: str, progress: Progress | None = None
) -> ModelWeights:
    """Read and pack everything. MemoryBudgetError where memory does not suffice."""
    file, names = source.file, source.names
    total_bytes = sum(header.num_bytes for header in file.tensors.values())
    done_bytes = 0
    packed: dict[str, PackedLinear] = {}
    try:
        for matrix, weight, bias in _read_ahead(source.file, _matrices(source, config)):
            packed[matrix.names[0]] = ops.pack_linear(weight, bias, weights_dtype)
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
            "choose a smaller model or --weights-dtype bf16"
        ) from error
    if progress is not None:
        progress(total_bytes, total_bytes)
    return weights


def _matrices(source: WeightSource, config: ModelConfig) -> Iterator[_Matrix]:
    names = source.names
    yield _Matrix((names.embedding,))
    heads = (config.num_heads, config.num_kv_heads) if source.pairs_interleaved else ()
    for index in range(config.num_layers):
        yield _Matrix(tuple(names.of_layer(index, name) for name in (names.q, names.k, names.v)), heads)
        yield _Matrix((names.of_layer(index, names.output),))
        yield _Matrix(tuple(names.of_layer(index, name) for name in (names.gate, names.up)))
        yield _Matrix((names.of_layer(index, names.down),))
    if not config.tie_word_embeddings:
        yield _Matrix((names.head,))


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


def _read_ahead(file: TensorFile, matrices: Iterable[_Matrix]) -> Iterator[tuple[_Matrix, F32, F32 | None]]:
    """Every matrix in order, the next few being read by threads meanwhile."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    pending: deque[tuple[_Matrix, Future[tuple[F32, F32 | None]]]] = deque()
    with ThreadPoolExecutor(num_threads, "octavo-read") as pool:
        try:
            for matrix in matrices:
                pending.append((matrix, pool.submit(_read_matrix, file, matrix)))
                if len(pending) > num_threads:
                    first, future = pending.popleft()
                    yield first, *future.result()
            while pending:
                first, future = pending.popleft()
                yield first, *future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read_matrix(file: TensorFile, matrix: _Matrix) -> tuple[F32, F32 | None]:
    """The tensors of a matrix one below the other, and their biases."""
    shapes = [file.tensors[f"{name}.weight"].shape for name in matrix.names]
    weight = np.empty((sum(shape[0] for shape in shapes), shapes[0][1]), np.float32)
    has_bias = f"{matrix.names[0]}.bias" in file.tensors
    bias = np.empty(len(weight), np.float32) if has_bias else None
    start = 0
    for index, name in enumerate(matrix.names):
        stop = start + shapes[index][0]
        heads = matrix.heads[index] if index < len(matrix.heads) else 0
        _read_rows(file, f"{name}.weight", weight[start:stop], heads)
        if bias is not None:
            _read_rows(file, f"{name}.bias", bias[start:stop], heads)
        start = stop
    return weight, bias


def _read_rows(file: TensorFile, name: str, out: F32, heads: int) -> None:
    """Fill out; with heads, rows 2j and 2j + 1 of each head become rows j and j + head_dim / 2."""
    if not heads:
        file.read_into(name, out)
        return
    stored = _read(file, name).reshape(heads, -1, 2, *out.shape[1:])
    out.reshape(heads, 2, -1, *out.shape[1:])[...] = stored.swapaxes(1, 2)


def _read(file: TensorFile, name: str) -> F32:
    values = np.empty(file.tensors[name].shape, np.float32)
    file.read_into(name, values)
    return values
