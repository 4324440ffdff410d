"""K of fp8 whose later numbers make up for the errors of earlier ones: bytes as of the reference, however written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps
from octavo.kv_formats.feedback import compensate
from octavo.kv_formats.small_float import E4M3, E5M2
from tests.kernels.paged_case import INSTRUCTION_SETS, Geometry, Piece, Pool, Stored, attend, batch_of, random_sequence
from tests.kernels.test_channel_scales import channel_scales
from tests.kernels.test_rope_write import ROWS, pieces_in, random_qkv, rope_table

each = pytest.mark.parametrize(
    ("instruction_set", "kv_format"),
    [(one, kv_format) for one in INSTRUCTION_SETS for kv_format in ("fp8_e4m3", "fp8_e5m2")],
)


def random_feedback(geometry: Geometry, size: float = 0.3) -> F32:
    shape = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
    return np.triu(size * np.random.default_rng(8).standard_normal(shape), 1).astype(np.float32)


def test_the_sums_are_those_that_it_says() -> None:
    rng = np.random.default_rng(1)
    x, feedback = rng.standard_normal((2, 16), np.float32), random_feedback(Geometry(2, 2, 16))
    found = compensate(x, feedback, E4M3)
    assert np.array_equal(found, E4M3.decode(E4M3.encode(found))), "the format holds them exactly"
    for head in range(2):
        errors: list[np.float32] = []
        for j in range(16):
            wanted = x[head, j]
            for before, error in enumerate(errors):
                wanted = np.float32(wanted - np.float32(error * feedback[head, before, j]))
            assert found[head, j] == E4M3.decode(E4M3.encode(wanted[None]))[0]
            errors.append(np.float32(found[head, j] - x[head, j]))
    nothing = np.zeros_like(feedback)
    assert np.array_equal(compensate(x, nothing, E5M2), E5M2.decode(E5M2.encode(x)))


@each
@pytest.mark.parametrize(("head_dim", "is_turned"), [(16, True), (48, False), (64, True), (80, True), (256, True)])
def test_bytes_equal_the_reference(instruction_set: str, kv_format: str, head_dim: int, is_turned: bool) -> None:
    geometry = Geometry(4, 2, head_dim, kv_format, 32)
    more = {"scales": channel_scales(geometry), "is_turned": is_turned, "k_feedback": random_feedback(geometry)}
    ours, theirs = Pool(geometry, 30, **more), Pool(geometry, 30, **more)  # type: ignore[arg-type]
    batch, rope = batch_of(pieces_in(ours, ROWS)), rope_table(128, head_dim)
    qkv = random_qkv(geometry, int(batch.query_start[-1]))
    qkv[3, 5 * head_dim] = np.nan  # of K, and more than the format holds
    qkv[7, 4 * head_dim + 2] = 1e9
    qkv[9, 4 * head_dim : 6 * head_dim] = 0
    qkv[11, 4 * head_dim : 6 * head_dim] *= np.float32(1e-6)
    out = np.zeros((len(qkv), 4, head_dim), np.float32)
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, ours.kv, out)
    ReferenceOps().rope_write(qkv, batch, rope, theirs.kv, out)
    assert np.array_equal(ours.kv.pool, theirs.kv.pool)
    before = ours.kv.pool.copy()
    NativeOps(2, instruction_set).rope_write(qkv, batch, rope, replace(ours.kv, k_feedback=None), out)
    assert not np.array_equal(ours.kv.pool, before)


@each
def test_a_token_has_the_same_bytes_in_a_step_of_its_own(instruction_set: str, kv_format: str) -> None:
    geometry = Geometry(4, 2, 64, kv_format)
    empty = np.zeros(0, np.float32)
    stored = Stored(empty, empty, empty, [3, 1, 5])
    qkv, rope, pools = random_qkv(geometry, 40), rope_table(64, 64), []
    for chunk in (1, 7, 40):
        pool = Pool(geometry, 6, is_turned=True, k_feedback=random_feedback(geometry))
        for first in range(0, 40, chunk):
            piece = Piece(stored, first, min(first + chunk, 40))
            out = np.zeros((piece.end - first, 4, 64), np.float32)
            NativeOps(2, instruction_set).rope_write(qkv[first : piece.end], batch_of([piece]), rope, pool.kv, out)
        pools.append(pool.kv.pool)
    assert np.array_equal(pools[0], pools[1])
    assert np.array_equal(pools[0], pools[2])


def test_feedback_that_does_not_fit_is_refused() -> None:
    geometry = Geometry(4, 2, 64, "fp8_e4m3")
    pool = Pool(geometry, 4, k_feedback=random_feedback(geometry))
    sequence = pool.add(*random_sequence(geometry, 20, seed=3))
    good = pool.kv
    assert good.k_feedback is not None
    for wrong, message in (
        (replace(good, k_feedback=good.k_feedback[:1].copy()), "num_kv_heads, head_dim, head_dim"),
        (replace(good, k_feedback=good.k_feedback[:, :32].copy()), "num_kv_heads, head_dim, head_dim"),
        (
            replace(good, kv_format="bf16", block_bytes=4 * good.block_bytes, pool=np.tile(good.pool, 4)),
            "goes with fp8",
        ),
    ):
        pool.kv = wrong
        with pytest.raises(ValueError, match=message):
            attend(NativeOps(1), pool, [Piece(sequence, 0, 20)])
