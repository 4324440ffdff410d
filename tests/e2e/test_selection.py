"""SnapKV and H2O on a tiny model: the same tokens are kept as torch chooses, and law 1 holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.heavy_hitters import HeavyHitters
from octavo.core.keep_policy import KeepPolicy
from octavo.core.snap_kv import SnapKV
from octavo.core.streaming import StreamingLLM
from octavo.executor.selection import scores_of
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import MASS_UNITS, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.models.loader import load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e.kept_by_torch import KeptByTorch
from tests.e2e.law1_engine import GREEDY, Answer, Engine, assert_same, chunked, with_tokens
from tests.models.tiny_families import make_family
from tests.models.tiny_models import make_tiny_model

SNAP = SnapKV(budget=40, window=8, kernel=5)
HEAVY = HeavyHitters(budget=40, recent=16, piece=24)  # drops at 64, 88, 112
POLICIES = [pytest.param(SNAP, id="snapkv"), pytest.param(HEAVY, id="h2o")]
LONG = replace(with_tokens(GREEDY, 40), ignore_eos=True)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 330, 90)]
each_policy = pytest.mark.parametrize("keep", POLICIES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama3")


def engine_of(path: Path, ops: Ops, kv_format: str = "f32", **options: object) -> Engine:
    return Engine(load_model(open_model(path), ops, "f32"), ops, kv_format, **options)  # type: ignore[arg-type]


def kept_slots(engine: Engine, name: str) -> list[np.ndarray]:
    """At each drop of a request: which slots stayed, [num_layers, num_kv_heads, num_kept]."""
    layers = engine.storage.layers
    found = []
    for compaction in (one for plan in engine.plans for one in plan.compactions):
        shape = (len(layers), layers[0].num_kv_heads, compaction.num_slots)
        bits = np.unpackbits(np.frombuffer(compaction.keep_list, np.uint8), count=int(np.prod(shape)))
        found.append(np.nonzero(bits.reshape(shape))[2].reshape(*shape[:2], -1))
    assert found, f"{name} has dropped nothing"
    return found


@each_policy
@pytest.mark.parametrize("implementation", [NativeOps, ReferenceOps])
def test_tokens_and_logits_are_those_of_torch(path: Path, keep: KeepPolicy, implementation: type[Ops]) -> None:
    engine = engine_of(path, implementation())
    answer = engine.ask("a", PROMPT, LONG, keep=keep)
    torch = KeptByTorch(path, keep, len(PROMPT))
    expected = torch.logits([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
    found = kept_slots(engine, "a")
    assert len(found) == len(torch.kept) > (keep is HEAVY)
    before: np.ndarray | None = None
    for mine, theirs in zip(found, torch.kept, strict=True):
        if before is not None:  # slots of what was kept, then later positions
            num_slots = theirs.shape[2] + 24
            later = np.broadcast_to(np.arange(before[0, 0, -1] + 1, before[0, 0, -1] + 25), (*before.shape[:2], 24))
            mine = np.take_along_axis(np.concatenate([before, later], axis=2), mine, axis=2)
            assert num_slots == before.shape[2] + 24
        assert np.array_equal(mine, theirs)
        before = mine
    assert np.abs(np.stack(answer.logits) - expected).max() < 1e-3
    whole = engine_of(path, implementation()).ask("whole", PROMPT, LONG)
    later = 1 if keep is SNAP else 0
    assert np.abs(whole.logits[later] - answer.logits[later]).max() > 1e-3, "nothing was dropped"


@each_policy
def test_scores_are_those_of_torch(path: Path, keep: KeepPolicy) -> None:
    engine = engine_of(path, NativeOps(2))
    masses = []
    weigh = engine.inner._selector.weighed

    def spy(row: object, rows: object) -> object:
        masses.append((row.weighing.choice, np.stack(rows.mass)))  # type: ignore[attr-defined]
        return weigh(row, rows)  # type: ignore[arg-type]

    engine.inner._selector.weighed = spy  # type: ignore[method-assign, assignment]
    answer = engine.ask("a", PROMPT, LONG, keep=keep)
    torch = KeptByTorch(path, keep, len(PROMPT))
    torch.logits([*PROMPT, *answer.token_ids])
    choice, mass = next((choice, mass) for choice, mass in masses if choice is not None)
    found = scores_of(mass, choice) / MASS_UNITS
    expected = torch.scores[0] * (SNAP.kernel * SNAP.window * 2 if keep is SNAP else 1)  # sums, of two query heads
    assert np.abs(found / expected - 1).max() < 1e-3


@pytest.fixture(scope="module")
def ops() -> Ops:
    return NativeOps(2)


@pytest.fixture(scope="module")
def cold(path: Path, ops: Ops) -> dict[KeepPolicy, Answer]:
    return {keep: engine_of(path, ops).ask("cold", PROMPT, LONG, keep=keep) for keep in (SNAP, HEAVY)}


@each_policy
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 23, 64])
def test_chunks_give_the_same(
    path: Path, ops: Ops, cold: dict[KeepPolicy, Answer], keep: KeepPolicy, num_tokens: int
) -> None:
    engine = engine_of(path, ops, config=chunked(num_tokens))
    assert_same(engine.ask("chunked", PROMPT, LONG, keep=keep), cold[keep], f"chunks of {num_tokens}")


@each_policy
@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_give_the_same(path: Path, cold: dict[KeepPolicy, Answer], keep: KeepPolicy, num_threads: int) -> None:
    engine = engine_of(path, NativeOps(num_threads))
    assert_same(engine.ask("threads", PROMPT, LONG, keep=keep), cold[keep], f"{num_threads} threads")


@each_policy
@pytest.mark.parametrize("first", [None, SNAP, HEAVY, StreamingLLM(4, 20, 16)])
def test_what_others_left_in_the_cache_gives_the_same(
    path: Path, ops: Ops, cold: dict[KeepPolicy, Answer], keep: KeepPolicy, first: KeepPolicy | None
) -> None:
    engine = engine_of(path, ops)
    engine.ask("first", PROMPT, LONG, keep=first)
    answer = engine.ask("warm", PROMPT, LONG, keep=keep)
    assert answer.final is not None
    # All but the window; full blocks of a prompt; those before the first drop; the sinks.
    num_found = {None: 82, SNAP: 80, HEAVY: 64}.get(first, 16)
    assert answer.final.num_cached_tokens == (num_found if keep is SNAP else 0)
    assert_same(answer, cold[keep], "warm")
    plain = engine.ask("plain", PROMPT, LONG)
    assert plain.final is not None
    assert plain.final.num_cached_tokens > 60
    assert_same(plain, engine_of(path, ops).ask("alone", PROMPT, LONG), "one that keeps all, after one that does not")


@each_policy
@pytest.mark.parametrize("num_hit", [1, 15, 16, 17, 33, 81, 82])
def test_a_hit_at_any_offset_gives_the_same(
    path: Path, ops: Ops, cold: dict[KeepPolicy, Answer], keep: KeepPolicy, num_hit: int
) -> None:
    engine = engine_of(path, ops)
    stranger = [*PROMPT[:num_hit], cases.other_than(PROMPT[num_hit], 330), *cases.other_ids(num_hit, 32, 330)]
    engine.ask("first", stranger)
    answer = engine.ask("warm", PROMPT, LONG, keep=keep)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == (num_hit if keep is SNAP else 0)
    assert_same(answer, cold[keep], f"hit of {num_hit}")


@each_policy
def test_among_others_and_after_a_preemption(
    path: Path, ops: Ops, cold: dict[KeepPolicy, Answer], keep: KeepPolicy
) -> None:
    """Preempted before and after the choice, in pools that are too small, beside other policies and none."""
    others: dict[str, KeepPolicy | None] = {"plain": None, "snap": SnapKV(20, 4, 3), "heavy": HeavyHitters(20, 4, 9)}
    prompt = cases.other_ids(1, 57, 330)
    alone = {name: engine_of(path, ops).ask(name, prompt, LONG, keep=other) for name, other in others.items()}
    before = after = 0
    for num_blocks in (9, 11, 14):
        for num_steps in (3, 12):
            engine = engine_of(path, ops, num_blocks=num_blocks, config=SchedulerConfig(5, 24))
            engine.add("target", PROMPT, LONG, keep=keep)
            for _ in range(num_steps):
                engine.step()
            for name, other in others.items():
                engine.add(name, prompt, LONG, keep=other, priority=-1)
            engine.run()
            assert_same(engine.answers["target"], cold[keep], f"pool of {num_blocks} blocks")
            for name, expected in alone.items():
                assert_same(engine.answers[name], expected, name)
            rows = [row for plan in engine.plans for row in plan.rows if row.request_id == "target"]
            again = [row for last, row in pairwise(rows) if row.start <= last.start]
            before += sum(row.weighing is not None for row in again)
            after += sum(row.weighing is None for row in again)
    assert before + after > 1
    assert after, "it was never preempted after a choice"


@each_policy
@pytest.mark.parametrize("switch", ["enable_kv_cache", "enable_prefix_caching"])
def test_without_a_cache_it_is_the_same(
    path: Path, ops: Ops, cold: dict[KeepPolicy, Answer], keep: KeepPolicy, switch: str
) -> None:
    engine = engine_of(path, ops, config=SchedulerConfig(2, 64, **{switch: False}))  # type: ignore[arg-type]
    assert_same(engine.ask("without", PROMPT, LONG, keep=keep), cold[keep], switch)


@each_policy
@pytest.mark.parametrize(
    "kv_format",
    ["int8", *(pytest.param(name, marks=pytest.mark.large) for name in ("bf16", "f16", "fp8_e4m3", "fp8_e5m2"))],
)
@pytest.mark.parametrize("block_size", [16, pytest.param(48, marks=pytest.mark.large)])
def test_every_format_gives_the_same_however_it_is_run(
    path: Path, keep: KeepPolicy, kv_format: str, block_size: int
) -> None:
    about = {"kv_format": kv_format, "block_size": block_size}
    expected = engine_of(path, NativeOps(1), **about).ask("cold", PROMPT, LONG, keep=keep)  # type: ignore[arg-type]
    engine = engine_of(path, NativeOps(3), num_blocks=-(-250 // block_size), config=SchedulerConfig(4, 11), **about)  # type: ignore[arg-type]
    engine.ask("first", PROMPT[:50], GREEDY)
    engine.add("target", PROMPT, LONG, keep=keep)
    for n in range(2):
        engine.add(f"other-{n}", cases.other_ids(n, 80, 330), LONG, keep=HEAVY if n else None, priority=-1)
    engine.run()
    assert_same(engine.answers["target"], expected, kv_format)


@each_policy
@pytest.mark.parametrize("kind", ["gpt2", "falcon_7b", "qwen3_moe"])
def test_every_family_counts_attention(tmp_path: Path, ops: Ops, kind: str, keep: KeepPolicy) -> None:
    path = make_family(tmp_path / kind, kind)
    prompt = [token % 290 + 3 for token in PROMPT]
    expected = engine_of(path, ops).ask("cold", prompt, LONG, keep=keep)
    engine = engine_of(path, ops, config=chunked(13))
    assert_same(engine.ask("chunked", prompt, LONG, keep=keep), expected, kind)
    whole = engine_of(path, ops).ask("whole", prompt, LONG)
    assert np.abs(whole.logits[-1] - expected.logits[-1]).max() > 1e-4
    masses = [result for plan in engine.plans for row in plan.rows if (result := row.weighing) and result.mass]
    for weighing in masses[:3]:
        mass = np.frombuffer(weighing.mass, np.int64).reshape(len(engine.storage.layers), -1)
        assert (mass.sum(axis=1) > MASS_UNITS).all(), "the attention of a layer is not counted"


def test_memory_is_bounded(path: Path, ops: Ops) -> None:
    engine = engine_of(path, ops, num_blocks=4)
    engine.ask("long", PROMPT, replace(LONG, max_tokens=200), keep=HEAVY)
    assert max(len(row.block_tables[0]) for plan in engine.plans for row in plan.rows) == 4
    engine = engine_of(path, ops, num_blocks=6)
    engine.ask("long", PROMPT, LONG, keep=SNAP)
    assert [len(plan.rows[0].block_tables[0]) for plan in engine.plans][-1] == 5, "of 40 + 39 tokens"
