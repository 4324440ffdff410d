"""Stored tokens are moved bit by bit, in every format, by a list of their own for each head."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.kernels.ops import KVLayer
from octavo.kv_formats import layout
from octavo.kv_formats.token_bytes import TokenMover
from tests.kernels.paged_case import Geometry, Pool, random_sequence


# Those in which a token has bytes of its own.
@pytest.mark.parametrize("kv_format", ["f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (2, 32, 48)])
def test_each_head_keeps_its_own_bits(kv_format: str, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    pool = Pool(Geometry(num_kv_heads, num_kv_heads, head_dim, kv_format, block_size=block_size), 40)
    sequence = pool.add(*random_sequence(pool.geometry, 90, seed=1))
    before = pool.kv.pool.copy()
    rng = np.random.default_rng(2)
    kept = np.sort(np.stack([rng.permutation(90)[:50] for _ in range(num_kv_heads)]), axis=1)
    source = np.array(sequence.blocks, np.int32)
    k, v = layout.read_tokens(pool.kv, source, 90)
    mover = TokenMover(pool.kv)
    found = mover.gather(pool.kv, source, kept)
    # the targets are some of the sources, in another order: all is read before anything is written
    target = source[: -(-50 // block_size)][::-1].copy()
    mover.scatter(pool.kv, target, np.broadcast_to(np.arange(50), kept.shape), found)
    moved_k, moved_v = layout.read_tokens(pool.kv, target, 50)
    for head, slots in enumerate(kept):
        assert np.array_equal(moved_k[head].view(np.uint32), k[head, slots].view(np.uint32))
        assert np.array_equal(moved_v[head].view(np.uint32), v[head, slots].view(np.uint32))
    changed = np.flatnonzero(pool.kv.pool != before)
    layer_bytes = pool.kv.block_bytes // 3
    assert set(changed // pool.kv.block_bytes) <= set(target.tolist())
    assert set(changed % pool.kv.block_bytes // layer_bytes) == {1}, "other layers are not touched"


def test_tokens_that_share_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared:
        """Two tokens to a byte."""

        @staticmethod
        def write_k(tile: np.ndarray, slot: int, k: np.ndarray) -> None:
            row, shift = tile.reshape(8, -1)[slot // 2], 4 * (slot % 2)
            row[...] = (row & (0xF0 >> shift)) | 5 << shift

        write_v = write_k

    monkeypatch.setitem(layout._CODECS, "f32", Shared)
    with pytest.raises(
        ConfigError, match="'f32' share bytes, so they cannot be kept one by one; take another --kv-cache-dtype"
    ):
        TokenMover(KVLayer(np.zeros(1 << 16, np.uint8), 1 << 14, 0, 16, 1, 32, "f32"))
