"""What the safetensors files of a directory hold, by their headers alone: bytes, and what most numbers are stored as.

A header is a claim by a stranger: its length is checked before it is read. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.json_file import MAX_JSON_BYTES, parse_json

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MAX_FILES = 4096


@dataclass(frozen=True, slots=True)
class StoredWeights:
    num_bytes: int
    main_dtype: str | None  # of the matrices; None where it is none of f32, f16 and bf16


def stored_weights(directory: Path) -> StoredWeights | None:
    """Of all weight files of the directory; None where there are none. ModelError for a damaged header."""
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("model-*.safetensors"))[:_MAX_FILES]
    if not files:
        return None
    num_bytes, count = 0, dict.fromkeys(_DTYPES, 0)
    others = 0
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            start, end, dtype, numbers, is_matrix = _entry(file, name, entry)
            num_bytes += end - start
            if is_matrix and dtype in count:
                count[dtype] += numbers
            elif is_matrix:
                others += numbers
    most = max(count, key=lambda name: count[name])
    return StoredWeights(num_bytes, _DTYPES[most] if count[most] > others else None)


def _header(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
                raise ModelError(
                    f"{path} cannot be used: its header claims {length} bytes of the file's {size} (at most "
                    f"{MAX_JSON_BYTES} are read): download it again"
                )
            return parse_json(file.read(length), f"the header of {path}")
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error


def _entry(path: Path, name: str, entry: object) -> tuple[int, int, str, int, bool]:
    """Start, end, dtype, numbers, and whether it is a matrix."""
    if isinstance(entry, Mapping):
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if (
            isinstance(dtype, str)
            and isinstance(shape, list)
            and isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(each) is int and each >= 0 for each in (*shape, *offsets))
            and offsets[0] <= offsets[1]
        ):
            numbers = 1
            for each in shape:
                numbers *= each
            return offsets[0], offsets[1], dtype, numbers, len(shape) == 2
    raise ModelError(f"{path}: tensor {name!r} has no dtype, shape and data_offsets that fit: download it again")
