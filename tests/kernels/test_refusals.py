"""What the binding refuses: no call from Python makes a kernel touch memory outside its arrays, or ends the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.kernels.ops import AttentionBatch, RopeTable
from tests.kernels.paged_case import Geometry, Pool

GEOMETRY = Geometry(num_heads=4, num_kv_heads=2, head_dim=16)
NUM_BLOCKS = 6
# two sequences: positions 10 to 19 in blocks 1 and 4, positions 0 to 2 in block 5
GOOD = AttentionBatch(
    np.array([0, 10, 13], np.int32), np.array([10, 0], np.int32), np.array([[[1, 4, 0], [5, 0, 0]]], np.int32)
)


def changed(name: str, index: int | tuple[int, ...], value: int) -> AttentionBatch:
    array = getattr(GOOD, name).copy()
    array[index] = value
    return replace(GOOD, **{name: array})


def run(batch: AttentionBatch, pool: Pool, *, op: str, max_positions: int = 64) -> None:
    ops, rows = NativeOps(2), int(GOOD.query_start[-1])
    q = np.ones((rows, 4, 16), np.float32)
    if op == "attention":
        ops.paged_attention(q, batch, pool.kv, 1.0, np.empty_like(q))
    else:
        table = np.ones((max_positions, 8), np.float32)
        ops.rope_write(np.ones((rows, 8 * 16), np.float32), batch, RopeTable(table, table), pool.kv, q)


@pytest.mark.parametrize("op", ["attention", "rope"])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed("block_tables", (0, 0, 1), NUM_BLOCKS), "block id"),
        (changed("block_tables", (0, 1, 0), -1), "block id"),
        (changed("block_tables", (0, 0, 0), 2**31 - 1), "block id"),
        (changed("start_position", 0, 39), "block table is too short"),
        (changed("start_position", 1, -1), "must not be negative"),
        (changed("start_position", 0, 2**31 - 1), "too short|rope table"),
        (changed("query_start", 0, 1), "query_start"),
        (changed("query_start", 1, 14), "query_start"),
        (changed("query_start", 2, 12), "query_start"),
        (replace(GOOD, block_tables=GOOD.block_tables[:, :1]), "number of sequences"),
        (replace(GOOD, start_position=GOOD.start_position[:1]), "number of sequences"),
    ],
)
def test_rows_outside_pool_or_tables_are_refused(op: str, batch: AttentionBatch, message: str) -> None:
    pool = Pool(GEOMETRY, NUM_BLOCKS)
    before = pool.kv.pool.copy()
    with pytest.raises(ValueError, match=message):
        run(batch, pool, op=op)
    assert (pool.kv.pool == before).all()
    run(GOOD, pool, op=op)


def test_positions_outside_the_rope_table_are_refused() -> None:
    pool = Pool(GEOMETRY, NUM_BLOCKS)
    run(GOOD, pool, op="rope", max_positions=20)
    with pytest.raises(ValueError, match="rope table"):
        run(GOOD, pool, op="rope", max_positions=19)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 24},
        {"block_size": 0},
        {"block_size": 272},
        {"head_dim": 24},
        {"head_dim": 272},
        {"num_kv_heads": 0},
        {"kv_format": "fp4"},
        {"layer_offset": -64},
        {"layer_offset": 1 << 20},
        {"block_bytes": 0},
        {"block_bytes": -64},
        {"block_bytes": 1 << 40},
    ],
)
def test_a_layer_that_does_not_fit_its_pool_is_refused(change: dict[str, object]) -> None:
    pool = Pool(GEOMETRY, NUM_BLOCKS)
    pool.kv = replace(pool.kv, **change)  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError)):
        run(GOOD, pool, op="attention")


def test_a_pool_is_never_written_as_a_copy_of_itself() -> None:
    """Another dtype, steps between its bytes, or read-only memory: a conversion would take the writes."""
    pool = Pool(GEOMETRY, NUM_BLOCKS)
    good = pool.kv
    read_only = good.pool.copy()
    read_only.flags.writeable = False
    for wrong in (good.pool.view(np.int8), np.repeat(good.pool, 2)[::2], read_only):
        pool.kv = replace(good, pool=wrong)
        with pytest.raises(TypeError):
            run(GOOD, pool, op="rope")
        with pytest.raises(TypeError):
            NativeOps(1).copy_blocks(wrong, good.block_bytes, np.array([0], np.int32), np.array([1], np.int32))


@pytest.mark.parametrize(("source", "target"), [(6, 0), (0, 6), (-1, 0), (0, -1)])
def test_copies_outside_the_pool_are_refused(source: int, target: int) -> None:
    pool = np.arange(6 * 64, dtype=np.uint8)
    before = pool.copy()
    with pytest.raises(ValueError, match="block id"):
        NativeOps(1).copy_blocks(pool, 64, np.array([1, source], np.int32), np.array([2, target], np.int32))
    assert (pool == before).all(), "all copies are checked before the first is made"


def test_copies_need_blocks_that_tile_the_pool() -> None:
    pool, none = np.zeros(6 * 64, np.uint8), np.zeros(0, np.int32)
    for block_bytes in (0, 100):
        with pytest.raises(ValueError, match="whole number of blocks"):
            NativeOps(1).copy_blocks(pool, block_bytes, none, none)
    with pytest.raises(ValueError, match="same length"):
        NativeOps(1).copy_blocks(pool, 64, np.zeros(1, np.int32), none)


def test_an_output_is_never_a_converted_copy() -> None:
    ops = NativeOps(1)
    x, weight = np.ones((3, 16), np.float32), np.ones(16, np.float32)
    for wrong in (np.empty((3, 16), np.float64), np.empty((3, 32), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            ops.rms_norm(x, weight, 1e-5, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            ops.linear(x, ops.pack_linear(np.ones((16, 16), np.float32), None, "f32"), wrong)  # type: ignore[arg-type]


THREADS = """
import resource
from octavo.errors import KernelError
from octavo.kernels.native import NativeOps
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
try:
    NativeOps(1024)
except KernelError as error:
    assert "1024 threads" in str(error), error
    print("refused")
assert NativeOps(2).num_threads == 2
print("goes on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space by /proc and setrlimit")
def test_threads_that_the_machine_does_not_give_are_an_error_and_not_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["refused", "goes on"]), done.stderr


def test_tails_go_with_formats_that_have_them() -> None:
    """Keys of int4 wait in another group's blocks: without them, outside of them, or for others, nothing is written."""
    pool = Pool(Geometry(4, 2, 32, "int4"), NUM_BLOCKS)
    q, ops = np.ones((13, 4, 32), np.float32), NativeOps(1)
    both = replace(GOOD, block_tables=np.concatenate([GOOD.block_tables] * 2))
    ops.paged_attention(q, both, pool.kv, 1.0, np.empty_like(q))
    assert pool.kv.tail is not None
    far = replace(pool.kv, tail=replace(pool.kv.tail, layer_offset=pool.kv.block_bytes - 64))
    plain = Pool(Geometry(4, 2, 32, "bf16"), NUM_BLOCKS)
    for kv, message in (
        (replace(pool.kv, tail=None), "has a tail where its KV format"),
        (replace(plain.kv, tail=plain.kv), "and only there"),
        (far, "tail does not lie inside a block"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(q, both, kv, 1.0, np.empty_like(q))
    outside = both.block_tables.copy()
    outside[1, 0, 1] = NUM_BLOCKS
    with pytest.raises(ValueError, match="block id"):
        ops.paged_attention(q, replace(both, block_tables=outside), pool.kv, 1.0, np.empty_like(q))
