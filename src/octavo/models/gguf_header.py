"""Reads the header of a GGUF file (versions 2 and 3, little-endian): metadata and tensor infos.

Every count, length and offset in the file is a claim by a stranger: it is compared with what is left of the file and
with fixed bounds before anything is allocated by it. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NoReturn

from octavo.errors import ModelError

# ggml type code -> (name, numbers in a block, bytes of a block)
TENSOR_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    30: ("bf16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    39: ("mxfp4", 32, 17),
}
# What can be counted but not decoded here.
_OTHER_TYPES = {
    9: ("q8_1", 32, 36),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
}
KNOWN_TYPES = TENSOR_TYPES | _OTHER_TYPES

TensorTypes = Mapping[int, tuple[str, int, int]]

_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 100_000
_MAX_DIMENSIONS = 4
_MAX_NUMBERS = 1 << 40  # of one tensor
_MAX_NAME_BYTES = 1 << 10
_MAX_STRING_BYTES = 64 << 20  # of all metadata strings together
_MAX_ELEMENTS = 4 << 20  # of all metadata arrays together
_MAX_ALIGNMENT = 1 << 16

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]  # slowest dimension first, as in numpy
    start: int  # of its bytes, in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    metadata: dict[str, Any]  # str, int, float, bool, list[str], or a numpy view of the file
    tensors: dict[str, TensorInfo]


def read_header(data: mmap, path: str, types: TensorTypes = TENSOR_TYPES) -> GgufHeader:
    """The header of the mapped file `data`; ModelError that names `path` for everything that is wrong with it.

    types: the tensor types that are taken; with KNOWN_TYPES also those that can only be counted.
    """
    reader = _Reader(data, path, types)
    magic = reader.take(4)
    if magic != b"GGUF":
        reader.fail(
            f"it starts with {magic!r}, not with b'GGUF': it is not a GGUF file; give one, or download it again"
        )
    version = reader.number("<I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian" if swapped in (2, 3) else f"version {version}"
        reader.fail(f"it is {kind}; versions 2 and 3, little-endian, can be read: convert the model again")
    num_tensors, num_pairs = reader.number("<Q"), reader.number("<Q")
    reader.check_count("tensors", num_tensors, _MAX_TENSORS, smallest=24)
    reader.check_count("metadata entries", num_pairs, _MAX_PAIRS, smallest=13)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.name()
        if key in metadata:
            reader.fail(f"the metadata key {key!r} stands twice")
        metadata[key] = reader.value(key)
    num_parts = metadata.get("split.count", 1)
    if type(num_parts) is int and num_parts > 1:
        reader.fail(f"it is one of {num_parts} parts, which cannot be read: join them with gguf-split --merge")
    claims = [reader.tensor_claim() for _ in range(num_tensors)]
    return GgufHeader(version, metadata, _place(reader, claims, _alignment(reader, metadata)))


@dataclass(frozen=True, slots=True)
class _Claim:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # from the start of the data


class _Reader:
    """A position in the file that never leaves it."""

    def __init__(self, data: mmap, path: str, types: TensorTypes) -> None:
        self.types = types
        self.data = data
        self.path = path
        self.position = 0
        self.size = len(data)
        self._string_bytes = 0
        self._elements = 0

    def fail(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path} cannot be used: {why}")

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.position:
            self.fail(
                f"it is damaged or cut short (at byte {self.position} it promises {num_bytes} more, and has "
                f"{self.size - self.position}): download it again"
            )

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def check_count(self, what: str, count: int, most: int, smallest: int) -> None:
        """Refuse a count that is above the bound, or that cannot fit what is left at `smallest` bytes a piece."""
        if count > most:
            self.fail(f"it claims {count} {what}; at most {most} are read: the file is damaged")
        self.need(count * smallest)

    def name(self) -> str:
        length = self.number("<Q")
        if length > _MAX_NAME_BYTES:
            self.fail(f"a name of {length} bytes at byte {self.position}; at most {_MAX_NAME_BYTES} are read")
        return self._decode(self.take(length), "a name")

    def value(self, key: str) -> Any:
        code = self.number("<I")
        if code == _STRING:
            return self.strings(1, key)[0]
        if code == _ARRAY:
            return self._array(key)
        if code not in _NUMBERS:
            self.fail(f"metadata {key!r} has the unknown type {code}")
        return self.number(_NUMBERS[code])

    def strings(self, count: int, key: str) -> list[str]:
        self.need(count * 8)
        data, position, size, unpack = self.data, self.position, self.size, struct.Struct("<Q").unpack_from
        budget = min(size, position + _MAX_STRING_BYTES - self._string_bytes + 8 * count)
        found: list[str] = []
        try:
            for _ in range(count):  # the one hot loop: a vocabulary has 100,000 strings
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > budget:
                    break
                found.append(str(data[start:position], "utf-8"))
        except struct.error:
            position = size + 1
        except UnicodeDecodeError as error:
            self.fail(f"string {len(found)} of metadata {key!r} is not valid UTF-8 ({error.reason})")
        if position > size:
            self.fail(f"string {len(found)} of metadata {key!r} ends behind the end of the file: download it again")
        if position > budget:
            self.fail(f"its metadata has more than {_MAX_STRING_BYTES} bytes of strings, the most that is read")
        self._string_bytes += position - self.position - 8 * count
        self.position = position
        return found

    def _array(self, key: str) -> Any:
        code, count = self.number("<I"), self.number("<Q")
        self._elements += count
        self.check_count("elements of metadata arrays", self._elements, _MAX_ELEMENTS, smallest=0)
        if code == _ARRAY:
            self.fail(f"metadata {key!r} is an array of arrays, which is not supported")
        if code == _STRING:
            return self.strings(count, key)
        if code not in _DTYPES:
            self.fail(f"metadata {key!r} is an array of the unknown type {code}")
        import numpy as np  # here, so that whoever only counts a file's bytes need not wait for it

        dtype = np.dtype(_DTYPES[code])
        self.need(count * dtype.itemsize)
        start = self.position
        self.position += count * dtype.itemsize
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)

    def tensor_claim(self) -> _Claim:
        name = self.name()
        num_dimensions = self.number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are supported")
        sizes = struct.unpack(f"<{num_dimensions}Q", self.take(8 * num_dimensions))
        code, offset = self.number("<I"), self.number("<Q")
        if code not in self.types:
            known = ", ".join(kind[0] for kind in self.types.values())
            called = KNOWN_TYPES[code][0] if code in KNOWN_TYPES else f"type {code}"
            self.fail(
                f"tensor {name!r} is stored as {called}, which is not supported; "
                f"supported are {known}: choose another quantisation of the model"
            )
        dtype, block, block_bytes = self.types[code]
        count = 1
        for size in sizes:  # Python's integers do not overflow
            count *= size
        if not 1 <= count <= _MAX_NUMBERS or sizes[0] % block:
            self.fail(f"tensor {name!r} ({dtype}) has the impossible shape {sizes[::-1]}")
        return _Claim(name, dtype, sizes[::-1], count // block * block_bytes, offset)

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} before byte {self.position} is not valid UTF-8 ({error.reason})")


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {alignment!r}; it must be a power of two, at most {_MAX_ALIGNMENT}")
    return alignment


def _place(reader: _Reader, claims: list[_Claim], alignment: int) -> dict[str, TensorInfo]:
    """Check that every tensor lies inside the file, aligned, and apart from the others."""
    data_start = -(-reader.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    end_before, name_before = data_start, ""
    for claim in sorted(claims, key=lambda claim: claim.offset):
        start = data_start + claim.offset
        if claim.name in placed:
            reader.fail(f"tensor {claim.name!r} stands twice")
        if claim.offset % alignment:
            reader.fail(f"tensor {claim.name!r} starts at {claim.offset}, which is not a multiple of {alignment}")
        if start + claim.num_bytes > reader.size:
            reader.fail(
                f"it is damaged or cut short (tensor {claim.name!r} ends at byte {start + claim.num_bytes}, the file "
                f"at {reader.size}): download it again"
            )
        if start < end_before:
            reader.fail(f"tensors {name_before!r} and {claim.name!r} overlap")
        placed[claim.name] = TensorInfo(claim.dtype, claim.shape, start, claim.num_bytes)
        end_before, name_before = start + claim.num_bytes, claim.name
    return placed
