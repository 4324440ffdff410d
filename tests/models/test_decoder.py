"""Layers in one call, layer by layer, and watched: the same bits of logits and pool, whichever way a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo.core.kv_spec import KVSpec
from octavo.executor.kv_storage import KVStorage
from octavo.executor.one_text import OneText
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import AttentionBatch, DecoderLayer, DecoderRows, HeardQueries, KVLayer
from octavo.models.loader import CausalLM, load_model, open_model
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model

IDS = [(7 * index + index * index) % 300 for index in range(150)]
FAMILIES = ["llama3", "gemma", "gemma2", "gemma3"]
DROPPED = 16


class Apart(NativeOps):
    """Every operation by itself."""

    def decoder_layers(
        self, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
    ) -> None:
        run_layers(self, layers, kv_layers, count, rows)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    make = make_tiny_model if request.param == "llama3" else make_family
    return make(path, request.param, head_dim=32)


def steps_of(model: CausalLM, kv_format: str) -> list[bytes]:
    """Logits of four steps of two sequences, one of which has dropped tokens, and what the pool holds behind each."""
    spec = KVSpec(model.kv_groups(kv_format), 16)
    num_groups, blocks_each = len(spec.groups), 5
    storage = KVStorage(spec, num_groups * 2 * blocks_each)
    storage.pool.fill(0)
    tables = np.arange(storage.num_blocks, dtype=np.int32).reshape(num_groups, 2, blocks_each)
    found, ids, done = [], np.array(IDS, np.int32), [0, 0]
    for counts in ((60, 9), (1, 33), (1, 1), (1, 1)):
        query_start = np.array([0, counts[0], sum(counts)], np.int32)
        slots = np.array(done, np.int32)
        gone = np.array([0, DROPPED if done[1] else 0], np.int32)
        batch = AttentionBatch(query_start, slots + gone, tables, slots if gone.any() else None)
        texts = [
            ids[50 * i + start : 50 * i + start + count]
            for i, (start, count) in enumerate(zip(done, counts, strict=True))
        ]
        logits = model.forward(np.concatenate(texts), batch, storage.layers, query_start[1:] - 1)
        assert np.isfinite(logits).all()
        found += [logits.tobytes(), storage.pool.tobytes()]
        done = [start + count for start, count in zip(done, counts, strict=True)]
    return found


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8_e4m3", "k8v4", "int4"])
@pytest.mark.parametrize("weights_dtype", ["f32", "int8"])
def test_layers_in_one_call_give_the_bits_of_single_operations(
    folder: Path, kv_format: str, weights_dtype: str
) -> None:
    source = open_model(folder)
    together, apart = (load_model(source, ops, weights_dtype) for ops in (NativeOps(2), Apart(2)))
    assert steps_of(together, kv_format) == steps_of(apart, kv_format)


def test_a_watched_text_has_the_bits_of_one_that_is_not(folder: Path) -> None:
    model = load_model(open_model(folder), NativeOps(2), "f32")
    expected = OneText(model, model.kv_groups("bf16"), len(IDS)).run(IDS)
    text = OneText(model, model.kv_groups("bf16"), len(IDS))
    heard = HeardQueries([np.zeros((heads, dim, dim)) for heads, dim in text.head_shapes])
    assert text.run(IDS, heard=heard).tobytes() == expected.tobytes()
    assert all(products.any() for products in heard.products)
