"""What the bytes of a KV tile mean: every bfloat16 code, rounding, and that a tile gives back what was put in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kv_formats import bf16, f32


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


@pytest.mark.parametrize("codec", [f32, bf16], ids=["f32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_a_tile_gives_back_what_was_put_in(codec: object, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((16, head_dim), dtype=np.float32)
    expected = bf16.round_trip(x) if codec is bf16 else x
    for encode, decode in ((codec.encode_k, codec.decode_k), (codec.encode_v, codec.decode_v)):  # type: ignore[attr-defined]
        tile = encode(x)
        assert tile.nbytes == 16 * head_dim * codec.ITEM_BYTES  # type: ignore[attr-defined]
        np.testing.assert_array_equal(decode(tile), expected)


def test_where_a_number_lies_in_a_bf16_tile() -> None:
    """K: [head_dim / 2][16][2]; V: [8][head_dim][2]."""
    x = np.arange(16 * 32, dtype=np.float32).reshape(16, 32) / 1024
    bits = bf16.to_bits(x)
    k = bf16.encode_k(x).view(np.uint16).reshape(16, 16, 2)
    v = bf16.encode_v(x).view(np.uint16).reshape(8, 32, 2)
    for token in (0, 5, 15):
        for dimension in (0, 7, 31):
            assert k[dimension // 2, token, dimension % 2] == bits[token, dimension]
            assert v[token // 2, dimension, token % 2] == bits[token, dimension]
