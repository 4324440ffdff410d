"""GGUF files that are damaged or made to attack: a ModelError that names the file, and bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, OctavoError
from octavo.kernels.reference import ReferenceOps
from octavo.models.gguf_file import GgufFile
from octavo.models.loader import load_model, open_model
from tests.models.tiny_gguf import make_tiny_gguf

HUGE = 2**64 - 1
LIKELY_BYTES = st.sampled_from([0, 1, 8, 9, 0x7F, 0x80, 0xFF])
LIKELY_NUMBERS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, HUGE])
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.too_slow],
)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, code: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + raw


def array(code: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", code, count) + raw


def tensor(name: str, sizes: tuple[int, ...] = (4,), code: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


def document(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", **claims: Any) -> bytes:
    """A file; claims replace magic, version, num_pairs or num_tensors."""
    head = claims.get("magic", b"GGUF") + struct.pack(
        "<IQQ",
        claims.get("version", 3),
        claims.get("num_tensors", len(tensors)),
        claims.get("num_pairs", len(pairs)),
    )
    raw = head + b"".join(pairs) + b"".join(tensors)
    return raw + b"\0" * (-len(raw) % 32) + data


def open_bytes(tmp_path: Path, raw: bytes) -> GgufFile:
    path = tmp_path / "made.gguf"
    path.write_bytes(raw)
    return GgufFile(path)


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    numbers = np.arange(8, dtype=np.float32)
    pairs = [
        pair("name", 8, text("some näme")),
        pair("count", 4, struct.pack("<I", 7)),
        pair("minus", 11, struct.pack("<q", -9)),
        pair("yes", 7, b"\1"),
        pair("list", 9, array(8, 3, text("a") + text("") + text("é"))),
        pair("numbers", 9, array(5, 3, struct.pack("<3i", 1, -2, 3))),
        pair("nothing", 9, array(6, 0, b"")),
    ]
    file = open_bytes(tmp_path, document(pairs, [tensor("x", (4, 2))], numbers.tobytes()))
    assert file.metadata["name"] == "some näme"
    assert file.metadata["count"] == 7
    assert file.metadata["minus"] == -9
    assert file.metadata["yes"] is True
    assert file.metadata["list"] == ["a", "", "é"]
    assert file.metadata["numbers"].tolist() == [1, -2, 3]
    assert len(file.metadata["nothing"]) == 0
    assert file.tensors["x"].shape == (2, 4)
    out = np.empty((2, 4), np.float32)
    file.read_into("x", out)
    np.testing.assert_array_equal(out.reshape(-1), numbers)


def test_alignment_is_honoured(tmp_path: Path) -> None:
    raw = document([pair("general.alignment", 4, struct.pack("<I", 64))], [tensor("x", (4,), 0, 64)])
    raw += b"\0" * (-len(raw) % 64) + b"\0" * 64 + np.full(4, 2.5, "<f4").tobytes()
    file = open_bytes(tmp_path, raw)
    out = np.empty(4, np.float32)
    file.read_into("x", out)
    assert out.tolist() == [2.5] * 4


DATA = b"\0" * 64
HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"GGU", "cut short"),
    "magic": (document([], [], magic=b"PK\3\4"), "not a GGUF file"),
    "version 1": (document([], [], version=1), "it is version 1; versions 2 and 3"),
    "version 4": (document([], [], version=4), "it is version 4"),
    "big-endian": (document([], [], version=0x03000000), "big-endian"),
    "number of tensors": (document([], [], num_tensors=HUGE), "claims 18446744073709551615 tensors; at most"),
    "tensors that cannot fit": (document([], [], num_tensors=99_999), "cut short"),
    "number of pairs": (document([], [], num_pairs=2**40), "metadata entries; at most"),
    "pairs that cannot fit": (document([], [], num_pairs=60_000), "cut short"),
    "length of a key": (document([struct.pack("<Q", HUGE) + DATA], []), "a name of 18446744073709551615 bytes"),
    "key past the end": (document([struct.pack("<Q", 1000) + DATA], []), "cut short"),
    "key that is not UTF-8": (document([pair("a", 0, b"\1")[:8] + b"\xff" + DATA], []), "not valid UTF-8"),
    "length of a string": (document([pair("a", 8, struct.pack("<Q", HUGE) + DATA)], []), "behind the end of the file"),
    "string that is not UTF-8": (document([pair("a", 8, text(b"\xff\xfe"))], []), "not valid UTF-8"),
    "type of a value": (document([pair("a", 13, DATA)], []), "unknown type 13"),
    "type of an array": (document([pair("a", 9, array(99, 1, DATA))], []), "unknown type 99"),
    "array of arrays": (document([pair("a", 9, array(9, 1, array(9, 1, DATA)))], []), "array of arrays"),
    "length of an array": (document([pair("a", 9, array(4, HUGE, DATA))], []), "elements of metadata arrays; at most"),
    "array past the end": (document([pair("a", 9, array(4, 1000, DATA))], []), "cut short"),
    "strings past the end": (document([pair("a", 9, array(8, 1000, DATA))], []), "cut short"),
    "a string of many past the end": (
        document([pair("a", 9, array(8, 3, text("ok") + struct.pack("<Q", 10**6) + DATA))], []),
        "string 1 of metadata 'a' ends behind the end",
    ),
    "a key twice": (document([pair("a", 0, b"\1"), pair("a", 0, b"\1")], []), "'a' stands twice"),
    "alignment": (document([pair("general.alignment", 4, struct.pack("<I", 33))], []), "alignment is 33"),
    "alignment 0": (document([pair("general.alignment", 4, struct.pack("<I", 0))], []), "alignment is 0"),
    "alignment as text": (document([pair("general.alignment", 8, text("32"))], []), "alignment is '32'"),
    "parts": (document([pair("split.count", 2, struct.pack("<H", 3))], []), "one of 3 parts.*gguf-split"),
    "no dimensions": (document([], [tensor("x", ()) + DATA], DATA), "has 0 dimensions"),
    "five dimensions": (document([], [tensor("x", (1, 1, 1, 1, 1))], DATA), "has 5 dimensions"),
    "dimensions beyond all": (document([], [text("x") + struct.pack("<I", 2**32 - 1) + DATA]), "dimensions"),
    "product of dimensions": (document([], [tensor("x", (2**32, 2**32, 2**32, 2**32))], DATA), "impossible shape"),
    "product that wraps to small": (document([], [tensor("x", (2**63, 2))], DATA), "impossible shape"),
    "no numbers": (document([], [tensor("x", (0,))], DATA), "impossible shape"),
    "half a block": (document([], [tensor("x", (33,), 2)], DATA), r"'x' \(q4_0\) has the impossible shape"),
    "tensor type": (document([], [tensor("x", (256,), 10)], DATA), "stored as q2_k, which is not supported; supported"),
    "tensor type beyond all": (document([], [tensor("x", (4,), 12345)], DATA), "stored as type 12345"),
    "offset past the end": (document([], [tensor("x", (4,), 0, 64)], DATA), "tensor 'x' ends at byte 144, the file at"),
    "offset beyond all": (document([], [tensor("x", (4,), 0, HUGE - 31)], DATA), "cut short"),
    "offset not aligned": (document([], [tensor("x", (4,), 0, 4)], DATA), "starts at 4, which is not a multiple of 32"),
    "size past the end": (document([], [tensor("x", (1000,))], DATA), "cut short"),
    "a tensor twice": (document([], [tensor("x"), tensor("x", offset=32)], DATA), "'x' stands twice"),
    "overlap": (document([], [tensor("x", (16,)), tensor("y", offset=32)], DATA), "'x' and 'y' overlap"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_directed_attacks(kind: str, tmp_path: Path) -> None:
    raw, words = HOSTILE[kind]
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=words) as caught:
            open_bytes(tmp_path, raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "made.gguf" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert peak < 2 << 20


def test_strings_are_bounded_together(tmp_path: Path) -> None:
    """Two long strings, each allowed alone, are more than is read."""
    long = text(b"a" * (40 << 20))
    with pytest.raises(ModelError, match="more than 67108864 bytes of strings"):
        open_bytes(tmp_path, document([pair("a", 8, long), pair("b", 8, long)], []))


def test_many_empty_strings_are_bounded(tmp_path: Path) -> None:
    many = array(8, 3 << 20, b"\0" * (24 << 20))
    with pytest.raises(ModelError, match="6291456 elements of metadata arrays; at most 4194304"):
        open_bytes(tmp_path, document([pair("a", 9, many), pair("b", 9, many)], []))


def test_every_truncation_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, "smollm2", "Q4_0", num_hidden_layers=1)
    raw = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 37), *range(2000, len(raw), len(raw) // 60), len(raw) - 1]:
        cut.write_bytes(raw[:length])
        with pytest.raises(ModelError):
            open_model(cut)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_tiny_gguf(path, "llama2", "Q4_0", num_hidden_layers=1)
    return path


def header_bytes(raw: bytes | bytearray) -> int:
    return raw.index(b"blk.0.attn_norm.weight") + 1000


def open_and_load(path: Path, raw: bytes) -> None:
    """A file either works or is refused in our words; whatever it claims, memory stays near its size."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        try:
            load_model(open_model(path), ReferenceOps(), "f32")
        except OctavoError as error:
            assert "\n" not in str(error)  # noqa: PT017
        assert tracemalloc.get_traced_memory()[1] < 40 * len(raw) + (8 << 20)
    finally:
        tracemalloc.stop()


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), LIKELY_BYTES | st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(changes: list[tuple[int, int]], tiny_file: Path, tmp_path: Path) -> None:
    raw = bytearray(tiny_file.read_bytes())
    size = header_bytes(raw)
    for position, value in changes:
        raw[position % size] = value
    open_and_load(tmp_path / "changed.gguf", bytes(raw))


@FUZZ
@given(position=st.integers(4, 1 << 20), value=LIKELY_NUMBERS | st.integers(0, HUGE))
def test_changed_numbers(position: int, value: int, tiny_file: Path, tmp_path: Path) -> None:
    """Eight bytes at a time: counts, lengths, sizes and offsets become edge values."""
    raw = bytearray(tiny_file.read_bytes())
    struct.pack_into("<Q", raw, position % header_bytes(raw), value)
    open_and_load(tmp_path / "changed.gguf", bytes(raw))


@FUZZ
@given(st.binary(max_size=400))
def test_noise(tmp_path: Path, noise: bytes) -> None:
    for raw in (noise, b"GGUF\3\0\0\0" + noise, b"GGUF\3\0\0\0" + bytes(7) + b"\0\1" + bytes(7) + noise):
        path = tmp_path / "noise.gguf"
        path.write_bytes(raw)
        with pytest.raises(ModelError):
            open_model(path)


def test_infinite_scales_are_no_crash(tmp_path: Path, tiny_file: Path) -> None:
    """Values in the data are not checked, and must neither warn nor raise."""
    raw = bytearray(tiny_file.read_bytes())
    raw[-2000:] = b"\xff" * 2000
    open_and_load(tmp_path / "infinite.gguf", bytes(raw))
