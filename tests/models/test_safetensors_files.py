"""Safetensors files and shards that are damaged or made to attack: a ModelError, and bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.models.loader import open_model
from octavo.models.safetensors_file import INDEX_NAME, SafetensorsFiles
from tests.models.tiny_models import make_tiny_model, to_stored, write_safetensors

LIKELY_BYTES = st.sampled_from(b'0123456789-[]{},:"eE.\\\0\xff')
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large, HealthCheck.too_slow],
)


def entry(shape: Any = (2, 2), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def document(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def open_bytes(directory: Path, raw: bytes) -> SafetensorsFiles:
    (directory / "model.safetensors").write_bytes(raw)
    return SafetensorsFiles(directory)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_values_are_read(dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"a": values[0], "b": values}, dtype)
    files = SafetensorsFiles(tmp_path)
    assert files.tensors["b"].dtype == dtype
    assert files.raw("b").tobytes() == to_stored(values, dtype)[1]
    out = np.empty((3, 5), np.float32)
    files.read_into("b", out)
    assert np.abs(out - values).max() <= {"f32": 0.0, "f16": 2e-3, "bf16": 2e-2}[dtype]


def test_the_safetensors_package_agrees(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(1)
    tensors = {"x": rng.standard_normal((7, 3)).astype(np.float32), "y": rng.standard_normal(9).astype(np.float16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = SafetensorsFiles(tmp_path)
    for name, values in load_file(tmp_path / "model.safetensors").items():
        out = np.empty(values.shape, np.float32)
        files.read_into(name, out)
        np.testing.assert_array_equal(out, values.astype(np.float32))


HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"abc", "header claims"),
    "length beyond all": (document({}, length=2**64 - 1), "header claims 18446744073709551615 bytes"),
    "length past the end": (document({"x": entry()}, length=10_000), "header claims 10000 bytes"),
    "not JSON": (document(b"hello"), "not valid JSON"),
    "not an object": (document([1]), "a JSON list where an object is expected"),
    "not UTF-8": (document(b'{"\xff": 1}'), "not valid JSON"),
    "nested without end": (document(b"[" * 100_000), "not valid JSON"),
    "a number of many digits": (document(b'{"x": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "a name twice": (document(b'{"x": 1, "x": 2}'), "'x' stands twice"),
    "an entry that is none": (document({"x": 5}), "'x' has no dtype, shape or data_offsets"),
    "no shape": (document({"x": {"dtype": "F32", "data_offsets": [0, 16]}}), "'x' has no dtype, shape"),
    "dtype": (
        document({"x": entry(dtype="F8_E4M3")}),
        "stored as 'F8_E4M3', which is not supported; supported are",
    ),
    "dtype of another kind": (document({"x": entry(dtype=["F32"])}), "is not supported"),
    "shape of another kind": (document({"x": entry(shape="2,2")}), "impossible shape"),
    "negative size": (document({"x": entry(shape=[-2, -2])}), "impossible shape"),
    "size that is no whole number": (document({"x": entry(shape=[2.0, 2])}), "impossible shape"),
    "size that is a truth value": (document({"x": entry(shape=[True, 4])}), "impossible shape"),
    "many dimensions": (document({"x": entry(shape=[1] * 9)}), "impossible shape"),
    "product of sizes": (document({"x": entry(shape=[2**47, 2**47, 2**47])}), "needs .* bytes and has 16"),
    "offsets past the end": (document({"x": entry(shape=[5], offsets=[0, 20])}), "the file has 16 bytes of data"),
    "negative offset": (document({"x": entry(offsets=[-16, 0])}), "lies at"),
    "offsets backwards": (document({"x": entry(offsets=[16, 0])}), "lies at"),
    "three offsets": (document({"x": entry(offsets=[0, 8, 16])}), "lies at"),
    "size and offsets differ": (document({"x": entry(shape=[3])}), "needs 12 bytes and has 16"),
    "overlap": (
        document({"x": entry(), "y": entry(shape=[1], offsets=[12, 16])}),
        "'y' overlaps the one before it",
    ),
    "the same bytes twice": (document({"x": entry(), "y": entry()}), "overlaps the one before it"),
    "a hole": (document({"x": entry(shape=[1], offsets=[12, 16])}), "12 bytes before tensor 'x' belong to no tensor"),
    "bytes left over": (document({"x": entry()}, bytes(20)), "has 20 bytes of data and its tensors need 16"),
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
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert peak < 8 << 20


def test_header_of_too_many_bytes(tmp_path: Path) -> None:
    """Nothing of a header beyond the bound is read, though the file has it."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200 << 20))
        file.truncate(300 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="header claims 209715200 bytes"):
            SafetensorsFiles(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "sharded", "llama2", num_shards=3)


def change_index(directory: Path, **places: Any) -> None:
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"].update(places)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "place",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "bad\nname.safetensors",
        "zero\0.safetensors",
        "half\ud800.safetensors",
        "x" * 300 + ".safetensors",
        "",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_shard_names_stay_in_the_directory(place: Any, sharded: Path) -> None:
    write_safetensors(sharded.parent / "outside.safetensors", {"lm_head.weight": np.zeros((2, 2), np.float32)}, "f32")
    change_index(sharded, **{"lm_head.weight": place})
    with pytest.raises(ModelError, match=r"lm_head\.weight.*must be the plain name of a \.safetensors file"):
        open_model(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 3 weight files: model-00002-of-00003\.safetensors"):
        open_model(sharded)


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    change_index(sharded, **{"some.weight": "model-00001-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"00001-of-00003\.safetensors has no tensor 'some\.weight'"):
        open_model(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    raw = (sharded / "model-00001-of-00003.safetensors").read_bytes()
    (sharded / "model-00002-of-00003.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="is in two shards"):
        open_model(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": [1]}])
def test_an_index_without_a_map(index: dict[str, Any], sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="has no weight_map"):
        open_model(sharded)


def test_an_index_of_too_many_shards(sharded: Path) -> None:
    change_index(sharded, **{f"t{number}": f"{number}.safetensors" for number in range(5000)})
    with pytest.raises(ModelError, match="names 5003 shards; at most 4096"):
        open_model(sharded)


def test_every_truncation_of_a_model(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "smollm2", num_hidden_layers=1) / "model.safetensors"
    raw = path.read_bytes()
    for length in [*range(0, 2000, 61), *range(2000, len(raw), len(raw) // 50), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError):
            open_model(tmp_path)


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("fuzz"), "smollm2", num_hidden_layers=1)
    (path / "original").write_bytes((path / "model.safetensors").read_bytes())
    return path


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), LIKELY_BYTES | st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(changes: list[tuple[int, int]], tiny_directory: Path) -> None:
    """Either the model opens as before, or it is refused in our words."""
    raw = bytearray((tiny_directory / "original").read_bytes())
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    for position, value in changes:
        raw[position % header_bytes] = value
    (tiny_directory / "model.safetensors").write_bytes(raw)
    tracemalloc.start()
    try:
        open_model(tiny_directory)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


@FUZZ
@given(
    header=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.sampled_from(["F32", "BF16"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "x", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    )
)
def test_any_json(header: Any, tmp_path: Path) -> None:
    raw = document(header)
    if header in ({}, {"__metadata__": None}):
        raw += b"left over"
    with pytest.raises(ModelError):
        open_bytes(tmp_path, raw)
