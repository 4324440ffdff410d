"""Safetensors: one file, or the shards that an index names. Knows no model.

The header is read here and not by the `safetensors` package, whose numpy side has no bfloat16. All that a header claims
is compared with the file. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import mmap
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from octavo.errors import ModelError
from octavo.kernels.ops import F32, U8
from octavo.kv_formats import bf16
from octavo.models.gguf_file import check_length, map_file
from octavo.models.json_file import MAX_JSON_BYTES, parse_json, read_json
from octavo.models.tensor_file import TensorHeader

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2)}
_MAX_SHARDS = 4096
_MAX_NAME_BYTES = 255  # of a file, where it is opened
_MAX_DIMENSIONS = 8
_PIECE_NUMBERS = 1 << 18  # numbers converted at a time


class SafetensorsFiles:
    """Implements `tensor_file.TensorFile`."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory)
        self._tensors: dict[str, TensorHeader] = {}
        self._places: dict[str, tuple[mmap.mmap, int]] = {}
        weight_map = {} if (directory / SINGLE_NAME).exists() else _weight_map(directory)
        for file_name in sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]:
            shard = _Shard(directory / file_name)
            for header, start in shard.read():
                if header.name in self._tensors:
                    raise ModelError(f"{directory}: tensor {header.name!r} is in two shards; download the model again")
                self._tensors[header.name] = header
                self._places[header.name] = (shard.data, start)
        missing = sorted(set(weight_map) - set(self._tensors))
        if missing:
            raise ModelError(
                f"{directory / weight_map[missing[0]]} has no tensor {missing[0]!r}, which {INDEX_NAME} says it has "
                f"({len(missing)} in all): download the model again"
            )

    @property
    def path(self) -> str:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return self._tensors

    def raw(self, name: str) -> U8:
        data, start = self._places[name]
        count = self._tensors[name].num_bytes
        return np.frombuffer(data, np.uint8, count, start) if count else np.empty(0, np.uint8)

    def read_into(self, name: str, out: F32, first: int = 0) -> None:
        header = self._tensors[name]
        assert first + out.size <= math.prod(header.shape), (name, out.shape, first, header.shape)
        check_length(self._places[name][0], self._path)
        raw, target = self.raw(name), out.reshape(-1)
        item_bytes = len(raw) // max(math.prod(header.shape), 1)
        raw = raw[first * item_bytes :]
        for start in range(0, len(target), _PIECE_NUMBERS):
            stop = min(start + _PIECE_NUMBERS, len(target))
            piece = raw[start * item_bytes : stop * item_bytes]
            if header.dtype == "bf16":
                target[start:stop] = bf16.from_bits(piece.view("<u2"))
            else:
                target[start:stop] = piece.view("<f4" if header.dtype == "f32" else "<f2")


def _weight_map(directory: Path) -> dict[str, str]:
    """tensor -> shard, from the index."""
    path = directory / INDEX_NAME
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map; download the model again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain(file_name):
            raise ModelError(
                f"{path}: tensor {name!r} is said to be in {reprlib.repr(file_name)}; a shard must be the plain name "
                "of a .safetensors file beside the index"
            )
    shards = set(weight_map.values())
    if len(shards) > _MAX_SHARDS:
        raise ModelError(f"{path} names {len(shards)} shards; at most {_MAX_SHARDS} are read")
    missing = sorted(name for name in shards if not (directory / name).exists())
    if missing:
        raise ModelError(
            f"{directory} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}; download the model again"
        )
    return weight_map


def _is_plain(file_name: str) -> bool:
    is_safe = file_name.isprintable() and not set(file_name) & set("/\\:") and not file_name.startswith(".")
    return is_safe and file_name.endswith(".safetensors") and len(file_name.encode()) <= _MAX_NAME_BYTES


class _Shard:
    """One file: its header, checked against its size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data = map_file(path)

    def read(self) -> list[tuple[TensorHeader, int]]:
        """Every tensor, with where its bytes start in the file."""
        size = len(self.data)
        length = int.from_bytes(self.data[:8], "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            self._fail(f"its header claims {length} bytes of the file's {size} (at most {MAX_JSON_BYTES} are read)")
        entries = parse_json(self.data[8 : 8 + length], f"the header of {self._path}")
        entries.pop("__metadata__", None)
        data_start, data_bytes = 8 + length, size - 8 - length
        found = [self._tensor(name, entry, data_bytes) for name, entry in entries.items()]
        end_before = 0
        for header, start in sorted(found, key=lambda item: (item[1], item[0].num_bytes)):
            if start < end_before:
                self._fail(f"tensor {header.name!r} overlaps the one before it")
            if start > end_before:
                self._fail(f"{start - end_before} bytes before tensor {header.name!r} belong to no tensor")
            end_before = start + header.num_bytes
        if end_before != data_bytes:
            self._fail(f"it has {data_bytes} bytes of data and its tensors need {end_before}")
        return [(header, data_start + start) for header, start in found]

    def _tensor(self, name: str, entry: Any, data_bytes: int) -> tuple[TensorHeader, int]:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
            self._fail(f"tensor {name!r} has no dtype, shape or data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ModelError(
                f"{self._path}: tensor {name!r} is stored as {reprlib.repr(dtype)}, which is not supported; supported "
                f"are {', '.join(_DTYPES)}: choose a model with one of these"
            )
        if not (_are_sizes(shape) and len(shape) <= _MAX_DIMENSIONS):
            self._fail(f"tensor {name!r} has the impossible shape {reprlib.repr(shape)}")
        if not (_are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1] <= data_bytes):
            self._fail(f"tensor {name!r} lies at {reprlib.repr(offsets)}, and the file has {data_bytes} bytes of data")
        own_name, item_bytes = _DTYPES[dtype]
        num_bytes = item_bytes
        for size in shape:
            num_bytes *= size
        if offsets[1] - offsets[0] != num_bytes:
            self._fail(f"tensor {name!r} of shape {shape} needs {num_bytes} bytes and has {offsets[1] - offsets[0]}")
        return TensorHeader(name, own_name, tuple(shape), num_bytes), offsets[0]

    def _fail(self, why: str) -> NoReturn:
        raise ModelError(f"{self._path} is damaged or cut short: {why}; download it again")


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
