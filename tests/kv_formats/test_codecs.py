"""What the bytes of a KV tile mean: every code, rounding, and that a tile gives back what was put in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.kv_bytes import FORMAT_BYTES, vector_bytes
from octavo.errors import ConfigError
from octavo.kv_formats import bf16, f16, int4, int8, k8v4, layout
from octavo.kv_formats.small_float import E4M3, E5M2, SmallFloat


def test_every_bf16_code_survives_a_round_trip() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    values = bf16.from_bits(codes)
    again = bf16.to_bits(values)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(again[~is_nan], codes[~is_nan])
    np.testing.assert_array_equal(again[is_nan], codes[is_nan] | 0x40)  # a NaN becomes quiet, and keeps its sign


def test_bf16_rounds_to_nearest_even_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    edges = (np.arange(65536, dtype=np.uint32)[:, None] << 16) + np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
    )
    values = np.concatenate([bits, edges.reshape(-1)]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16.to_bits(values), expected)


def test_bf16_keeps_nan_and_infinity() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    back = bf16.round_trip(values)
    assert np.isnan(back[0])
    assert back[1] == np.inf
    assert back[2] == -np.inf
    assert np.signbit(back[4])
    assert not np.signbit(back[3])


FORMATS = tuple(FORMAT_BYTES)


def tile_of(kv_format: str, part: str, x: np.ndarray) -> np.ndarray:
    """The bytes of a K or V tile of 16 tokens."""
    form = layout.codec(kv_format)
    tile = np.zeros(16 * getattr(FORMAT_BYTES[kv_format], part).of(x.shape[1]), np.uint8)
    getattr(form, f"write_{part}")(tile, 0, x)
    return tile


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_a_tile_gives_back_what_was_put_in(kv_format: str, part: str, head_dim: int) -> None:
    """Exactly what the format can hold; token by token or all at once, the same bytes."""
    x = np.random.default_rng(head_dim).standard_normal((16, head_dim), dtype=np.float32)
    tile = tile_of(kv_format, part, x)
    values = getattr(layout.codec(kv_format), f"decode_{part}")(tile)
    steps = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
    if kv_format in steps:
        assert (np.abs(values - x) <= steps[kv_format] * np.abs(x) + 2**-10 * kv_format.startswith("fp8")).all()
    else:
        axis = 0 if (kv_format, part) == ("int4", "k") else 1  # by channel, else by token
        levels = 15 if kv_format == "int4" or (kv_format, part) == ("k8v4", "v") else 254
        spread = np.ptp(x, axis, keepdims=True) if levels == 15 else 2 * np.abs(x).max(axis, keepdims=True)
        assert (np.abs(values - x) <= (0.5 / levels + 0.005) * spread).all()
        if axis == 0:
            return  # a whole tile at once
    one_by_one = np.full_like(tile, 0xAA)
    for token in np.random.default_rng(1).permutation(16):
        getattr(layout.codec(kv_format), f"write_{part}")(one_by_one, token, x[token : token + 1])
    np.testing.assert_array_equal(one_by_one, tile)


def test_where_a_number_lies_in_a_bf16_tile() -> None:
    """K: [head_dim / 2][16][2]; V: [8][head_dim][2]."""
    x = np.arange(16 * 32, dtype=np.float32).reshape(16, 32) / 1024
    bits = bf16.to_bits(x)
    k = tile_of("bf16", "k", x).view(np.uint16).reshape(16, 16, 2)
    v = tile_of("bf16", "v", x).view(np.uint16).reshape(8, 32, 2)
    for token in (0, 5, 15):
        for dimension in (0, 7, 31):
            assert k[dimension // 2, token, dimension % 2] == bits[token, dimension]
            assert v[token // 2, dimension, token % 2] == bits[token, dimension]


def test_where_a_number_lies_in_tiles_of_codes() -> None:
    """8 bits: fours of dimensions (K) or tokens (V), and int8's scales between those of K and V; 4 bits: V
    [4][head_dim / 32][16][4], two to a byte."""
    x = np.random.default_rng(2).standard_normal((16, 64), dtype=np.float32)
    codes, scales = int8.encode(x)
    k_tile, v_tile = tile_of("int8", "k", x), tile_of("int8", "v", x)
    np.testing.assert_array_equal([k_tile[1024:].view(np.uint16), v_tile[:32].view(np.uint16)], [scales, scales])
    k, v = k_tile[:1024].reshape(16, 4, 2, 4, 2), v_tile[32:].reshape(4, 4, 4, 2, 4, 2)
    small, _, _ = k8v4.encode(x)
    v4 = tile_of("k8v4", "v", x)[:512].reshape(4, 2, 16, 4)
    for token in (0, 5, 15):
        for dimension in (0, 7, 31, 50):
            at = (dimension // 4, token // 4, dimension % 4 // 2, token % 4, dimension % 2)
            assert k[at] == codes[token, dimension]
            at_v = (token // 4, dimension // 16, dimension % 16 // 4, token % 4 // 2, dimension % 4, token % 2)
            assert v[at_v] == codes[token, dimension]
            byte = v4[token // 4, dimension // 32, dimension % 16, token % 4]
            assert (byte >> (4 * (dimension // 16 % 2))) & 15 == small[token, dimension]


def test_where_a_number_lies_in_a_k_tile_of_int4() -> None:
    """Eight dimensions of a token to a word, two to a byte: [head_dim / 8][16][4]; scales and minima by channel."""
    x = bf16.round_trip(np.random.default_rng(2).standard_normal((16, 64), dtype=np.float32))
    codes, scales, minima = k8v4.encode(x.T)
    tile = tile_of("int4", "k", x)
    words = tile[:512].reshape(8, 16, 4)
    for token in (0, 5, 15):
        for dimension in (0, 3, 4, 7, 8, 31, 53):
            byte = words[dimension // 8, token, dimension % 4]
            assert (byte >> (4 * (dimension // 4 % 2))) & 15 == codes[dimension, token]
    np.testing.assert_array_equal(tile[512:].view(np.uint16).reshape(2, 64), [scales, minima])


def test_int4_keys_are_quantised_as_bf16_has_them() -> None:
    """A tile waits in bf16 until it is full: what it is made from then is no more precise."""
    x = np.random.default_rng(3).standard_normal((16, 32), dtype=np.float32)
    np.testing.assert_array_equal(tile_of("int4", "k", x), tile_of("int4", "k", bf16.round_trip(x)))
    with pytest.raises(AssertionError, match="whole tiles"):
        int4.write_k(tile_of("int4", "k", x), 3, x[:1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_channel_of_int4_keys_that_is_not_finite_is_nan_in_its_tile(bad: float) -> None:
    x = np.ones((16, 32), np.float32)
    x[5, 7] = bad
    values = int4.decode_k(tile_of("int4", "k", x))
    assert np.isnan(values[:, 7]).all()
    assert np.isfinite(np.delete(values, 7, axis=1)).all()


FP8 = [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]


@pytest.mark.parametrize(("form", "dtype"), FP8, ids=["e4m3", "e5m2"])
def test_every_fp8_code_means_what_torch_says_and_survives(form: SmallFloat, dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(dtype).to(torch.float32).numpy()
    values = form.decode(codes)
    np.testing.assert_array_equal(values, expected)
    again = form.encode(values)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(again[~is_nan], codes[~is_nan])
    assert ((again[is_nan] & 0x7F) == 0x7F).all()


@pytest.mark.parametrize(("form", "dtype"), FP8, ids=["e4m3", "e5m2"])
def test_fp8_rounds_as_torch_does_and_keeps_what_is_too_large(form: SmallFloat, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 400_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate(
        [anything[~np.isnan(anything)], np.ldexp(rng.standard_normal(400_000), rng.integers(-20, 16, 400_000))]
    )
    table = form.decode(np.arange(0x7C, dtype=np.uint8))
    middles = (table[1:] + table[:-1]) / 2  # ties, and the floats beside them
    values = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)]).astype(np.float32)
    values = np.concatenate([values, -values])
    fits = np.abs(values) <= form.largest
    expected = torch.from_numpy(values[fits]).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(form.encode(values[fits]), expected)
    large = values[np.isfinite(values) & ~fits]
    assert len(large) > 1000
    np.testing.assert_array_equal(form.decode(form.encode(large)), np.copysign(form.largest, large))
    infinities = form.decode(form.encode(np.array([np.inf, -np.inf, np.nan], np.float32)))
    assert np.isnan(infinities[2])
    assert np.isinf(infinities[:2]).all() if form.has_infinity else np.isnan(infinities[:2]).all()


def test_f16_rounds_as_numpy_and_keeps_nan() -> None:
    values = np.array([65504, 65519, 65520, 1e10, -1e10, 6e-8, 2e-8, -0.0, np.inf, np.nan], np.float32)
    back = f16.to_bits(values).view(np.float16)
    np.testing.assert_array_equal(back[:4], [65504, 65504, np.inf, np.inf])
    assert back[5] == np.float16(2**-24)
    assert back[6] == 0
    assert np.signbit(back[7])
    assert np.isnan(back[9])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_nan_as_a_whole(bad: float) -> None:
    x = np.ones((3, 32), np.float32)
    x[1, 7] = bad
    for kv_format, part in (("int8", "k"), ("int8", "v"), ("k8v4", "v"), ("int4", "v")):
        values = getattr(layout.codec(kv_format), f"decode_{part}")(tile_of(kv_format, part, np.tile(x, (6, 1))[:16]))
        assert np.isnan(values[1]).all()
        assert np.isfinite(values[[0, 2]]).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-44, -1e-40, 3.0, -7.5, 1e38, -3e38])
def test_rows_of_one_value_come_back_within_the_precision_of_the_scale(value: float) -> None:
    x = np.full((16, 32), value, np.float32)
    for kv_format, part in (("int8", "k"), ("int8", "v"), ("k8v4", "v"), ("int4", "k"), ("int4", "v")):
        values = getattr(layout.codec(kv_format), f"decode_{part}")(tile_of(kv_format, part, x))
        assert np.isfinite(values).all()
        if abs(value) < 3e38:
            np.testing.assert_allclose(values, x, rtol=0.004, atol=1e-38)


def test_the_bytes_of_a_token() -> None:
    """The figures that the plan and the documents show, for heads of 64 and of 128."""
    found = {(name, dim): vector_bytes(name, dim) for name in FORMAT_BYTES for dim in (64, 128)}
    assert found["bf16", 64] == found["f16", 64] == 256
    assert found["fp8_e4m3", 64] == found["fp8_e5m2", 64] == 128
    assert found["int8", 64] == 132
    assert found["int8", 128] == 260
    assert found["k8v4", 64] == 66 + 36
    assert found["int4", 64] == 48 + 36  # 0.328 of bf16
    assert found["int4", 128] == 96 + 68
    assert vector_bytes("int8", 576, "latent") == 578


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "message"),
    [("fp4", 64, "'fp4' is not one of f32, bf16"), ("k8v4", 80, "multiple of 32"), ("int4", 80, "multiple of 32")],
)
def test_what_cannot_be_held_is_refused_by_name(kv_format: str, head_dim: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vector_bytes(kv_format, head_dim)


def test_latents_are_not_kept_in_int4() -> None:
    with pytest.raises(ConfigError, match="latents are both; choose int8"):
        vector_bytes("int4", 576, "latent")
