"""Where a token lies in a block: writing and reading through block tables."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import ConfigError
from octavo.kernels.ops import KVLayer
from octavo.kv_formats import bf16, layout


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("block_size", [16, 48])
def test_tokens_come_back_through_a_shuffled_block_table(kv_format: str, block_size: int) -> None:
    rng = np.random.default_rng(1)
    group = KVGroupSpec("full", (0, 1), 3, 32, kv_format)
    spec = KVSpec((group,), block_size)
    pool = np.full(spec.pool_bytes(5), 0xFF, np.uint8)  # NaN wherever nothing was written
    layer_bytes = spec.bytes_per_block // 2
    layers = [KVLayer(pool, spec.bytes_per_block, i * layer_bytes, block_size, 3, 32, kv_format) for i in range(2)]
    table = np.array([4, 0, 2, 3, 1], np.int32)
    num_tokens = 2 * block_size + 5
    written = []
    for layer in layers:
        k, v = rng.standard_normal((2, num_tokens, 3, 32), dtype=np.float32)
        for position in range(num_tokens):
            block_id = int(table[position // block_size])
            layout.write_token(layer, block_id, position % block_size, k[position], v[position])
        written.append((k, v))
    for layer, (k, v) in zip(layers, written, strict=True):
        read_k, read_v = layout.read_tokens(layer, table, num_tokens)
        if kv_format == "bf16":
            k, v = bf16.round_trip(k), bf16.round_trip(v)
        np.testing.assert_array_equal(read_k, k.transpose(1, 0, 2))
        np.testing.assert_array_equal(read_v, v.transpose(1, 0, 2))


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'fp4' is not one of f32, bf16"):
        layout.codec("fp4")
