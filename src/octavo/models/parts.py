"""What tensors a model must have, and which matrices and vectors of the forward pass they make; the check of a file.

A family lists its parts for a config and a file format; `packing` reads them. It knows no arithmetic and no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.errors import ModelError
from octavo.kernels.ops import F32
from octavo.models.tensor_file import TensorFile

Shape = tuple[int, ...]
Part = tuple[int, int]  # from the first to before the second
Change = Callable[[F32], F32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix, from one tensor of the file, or from a part of it (one of many experts, one of many heads)."""

    tensor: str
    shape: Shape  # of the whole tensor in the file
    bias: str | None = None
    bias_shape: Shape = ()
    part: Part | None = None  # which rows of the tensor, as [rows, columns of its last dimension]; None: all
    bias_part: Part | None = None  # which numbers of the bias, in the order of the file
    interleaved_heads: int = 0  # heads whose rows 2j and 2j + 1 become rows j and j + head_dim / 2
    change: Change | None = None  # from what was read to [num_outputs, num_inputs]
    change_bias: Change | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix, by the name that the model's file gives it: rows of tensors one below the other."""

    key: str
    rows: tuple[Rows, ...]
    is_of_vocabulary: bool = False  # the embedding or the head
    dtype: str | None = None  # "f32" where rounding would do harm (routers)


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers that are kept as f32: norms, positions, sinks."""

    key: str
    tensor: str
    shape: Shape
    added: float = 0.0  # Gemma's norms are stored less 1
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that is read of a file."""

    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...]
    allowed: frozenset[str] = frozenset()  # tensors that may be there and say nothing new
    ignored: tuple[str, ...] = ()  # endings of such tensors
    unused: tuple[str, ...] = ()  # beginnings of tensors that plain generation does not use

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Every tensor that must be there."""
        for matrix in self.matrices:
            for rows in matrix.rows:
                yield rows.tensor, rows.shape
                if rows.bias is not None:
                    yield rows.bias, rows.bias_shape
        for vector in self.vectors:
            if not vector.is_optional:
                yield vector.tensor, vector.shape


def linear(stem: str, num_outputs: int, num_inputs: int, has_bias: bool = False, interleaved_heads: int = 0) -> Rows:
    """The usual case: `stem`.weight [num_outputs, num_inputs], and `stem`.bias."""
    return Rows(
        f"{stem}.weight",
        (num_outputs, num_inputs),
        f"{stem}.bias" if has_bias else None,
        (num_outputs,),
        interleaved_heads=interleaved_heads,
    )


def part_shape(rows: Rows) -> Shape:
    """[rows, columns] of what is read, before any change of it."""
    start, end = rows.part or (0, math.prod(rows.shape[:-1]))
    return end - start, rows.shape[-1]


def expert_linear(tensor: str, shape: Shape, expert: int, bias: str | None = None) -> Rows:
    """One expert of a stack [num_experts, num_outputs, num_inputs], with biases [num_experts, num_outputs]."""
    part = expert * shape[1], (expert + 1) * shape[1]
    return Rows(tensor, shape, bias, shape[:2], part=part, bias_part=part)


def without_prefix(parts: Parts, prefix: str) -> Parts:
    """The same parts of a file whose names lack a prefix."""

    def stripped(rows: Rows) -> Rows:
        bias = None if rows.bias is None else rows.bias.removeprefix(prefix)
        return replace(rows, tensor=rows.tensor.removeprefix(prefix), bias=bias)

    return replace(
        parts,
        matrices=tuple(replace(one, rows=tuple(stripped(rows) for rows in one.rows)) for one in parts.matrices),
        vectors=tuple(replace(one, tensor=one.tensor.removeprefix(prefix)) for one in parts.vectors),
    )


def check_tensors(parts: Parts, file: TensorFile, architecture: str) -> None:
    """ModelError where the file lacks a tensor, has one of another shape, or one that the config does not call for."""
    expected = dict(parts.tensors())
    for name, shape in expected.items():
        if name not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {name!r} {list(shape)}; it is incomplete: download it again")
    optional = {vector.tensor: vector.shape for vector in parts.vectors if vector.is_optional}
    for name, header in file.tensors.items():
        shape = expected.get(name) or optional.get(name) or header.shape
        if header.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name!r} has the shape {list(header.shape)} where the model's config asks for "
                f"{list(shape)}; config and weights do not belong together: download both again"
            )
        is_known = name in expected or name in optional or name in parts.allowed
        if not is_known and not name.endswith(parts.ignored) and not name.startswith(parts.unused):
            raise ModelError(
                f"{file.path}: tensor {name!r} belongs to no part of a {architecture} with this config; octavo would "
                "have to leave it out, and answer differently from the model: choose another model"
            )
