"""Law 1 on tiny random models: every instruction set and dtype, and random interleavings of all that can happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.certify.calibration import CalibrationAsk, calibrate
from octavo.core.config import SchedulerConfig
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.executor.config import SCALABLE_FORMATS, schemes_of
from octavo.kernels.native import NativeOps, supported_instruction_sets
from octavo.models.loader import CausalLM, load_model, open_model
from tests.e2e import law1_cases as cases
from tests.e2e import law1_families as families
from tests.e2e.law1_engine import Answer, Engine, assert_same, assert_same_start
from tests.models.tiny_models import make_tiny_model

BASE = cases.other_ids(99, 100, 300)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama3", dtype="f32")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("wide"), "llama_wide_heads", dtype="f32")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen"), "qwen3", dtype="f32")


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("weights_dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_every_case_on_every_instruction_set(
    llama: Path, instruction_set: str, weights_dtype: str, kv_format: str
) -> None:
    ops = NativeOps(2, instruction_set)
    model = load_model(open_model(llama), ops, weights_dtype)
    cases.gauntlet(lambda **settings: Engine(model, ops, kv_format, **settings), BASE)


@pytest.mark.parametrize("kv_format", sorted(set(FORMAT_BYTES) - {"f32", "bf16", "int4"}))
def test_every_case_on_every_other_kv_format(wide: Path, kv_format: str) -> None:
    ops = NativeOps(2)
    model = load_model(open_model(wide), ops, "int8")
    cases.gauntlet(lambda **settings: Engine(model, ops, kv_format, **settings), BASE)


@pytest.mark.parametrize(
    ("kv_format", "scheme"),
    [(kv_format, scheme) for kv_format in SCALABLE_FORMATS for scheme in schemes_of(kv_format)],
)
def test_every_case_with_calibrated_scales(wide: Path, kv_format: str, scheme: str) -> None:
    ops = NativeOps(2)
    model = load_model(open_model(wide), ops, "int8")
    scales = calibrate(model, BASE, CalibrationAsk(kv_format, scheme, "", ""))
    cases.gauntlet(lambda **settings: Engine(model, ops, kv_format, scales=scales, **settings), BASE)


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_every_case_of_int4(wide: Path, instruction_set: str) -> None:
    """Its tails are KV groups. A hit inside a block is exact, for the tail is copied as well."""
    make = int4_maker(wide, NativeOps(2, instruction_set))
    families.gauntlet(make, BASE, offsets=range(13, 99, 17))


def test_int4_does_not_depend_on_block_size_or_threads(wide: Path) -> None:
    """A row's own tile is read in bf16, and 16 tokens are a tile in every block."""
    expected = cases.cold(int4_maker(wide, NativeOps(1)), BASE)
    for block_size in (16, 48):
        make = int4_maker(wide, NativeOps(2), block_size=block_size)
        assert_same(cases.cold(make, BASE), expected, f"two threads, blocks of {block_size}")
        cases.in_chunks(make, BASE, expected, 7)
        for num_hit in (40, 71):
            families.warm_at_offset(make, BASE, expected, num_hit)


def int4_maker(path: Path, ops: NativeOps, **settings: int) -> Callable[..., Engine]:
    model = load_model(open_model(path), ops, "int8")
    return lambda **more: Engine(model, ops, "int4", **{"num_blocks": 256, **settings, **more})


def test_a_hit_inside_a_block_of_int4_whose_tail_is_gone_does_not_happen(wide: Path) -> None:
    """Then the hit ends at the block before, and the answer is the same."""
    ops = NativeOps(2)
    model = load_model(open_model(wide), ops, "int8")
    expected = Engine(model, ops, "int4").ask("cold", BASE)
    engine = Engine(model, ops, "int4")
    engine.ask("first", BASE)
    passed = engine.core.status().cached_blocks - len(BASE) // 16
    engine.blocks.supply.evict(passed)  # tails leave first
    answer = engine.ask("again", BASE)
    assert answer.final is not None
    assert answer.final.num_cached_tokens == len(BASE) // 16 * 16
    assert_same(answer, expected, "without tails")


def test_every_case_with_some_layers_in_another_format(wide: Path) -> None:
    ops = NativeOps(2)
    model = load_model(open_model(wide), ops, "int8")
    settings = {"formats": {1: "bf16"}, "num_blocks": 128}
    families.gauntlet(
        lambda **more: Engine(model, ops, "int8", **{**settings, **more}), BASE, offsets=range(13, 99, 17)
    )


@pytest.mark.parametrize("block_size", [32, 48])
def test_every_case_with_head_norms_and_larger_blocks(qwen: Path, block_size: int) -> None:
    ops = NativeOps(2)
    model = load_model(open_model(qwen), ops, "bf16")
    prompt = cases.other_ids(7, 6 * block_size + 4, 300)
    cases.gauntlet(
        lambda **settings: Engine(model, ops, block_size=block_size, **{"num_blocks": 96, **settings}), prompt
    )


PARAMS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=5, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=18, temperature=1.0, top_p=0.9, logprobs=2),
    SamplingParams(
        max_tokens=9, temperature=2.0, top_k=20, presence_penalty=0.5, min_tokens=4, stop_token_ids=(5, 6, 7)
    ),
)
LONGEST = 70 + 40


@dataclass(frozen=True)
class Asked:
    """A prompt is the first `shared` tokens of one text, then tokens of its own."""

    shared: int
    own: int
    own_seed: int
    params: int
    seed: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*BASE[: self.shared], *cases.other_ids(self.own_seed, self.own, 300))


asked = st.builds(
    Asked,
    shared=st.sampled_from([0, 0, 0, 1, 15, 16, 17, 31, 32, 40, 47, 48, 50]),
    own=st.sampled_from([1, 1, 5, 14, 20]),
    own_seed=st.integers(0, 3),
    params=st.sampled_from([0, 1, 2, 2, 3, 4]),
    seed=st.integers(0, 1),
)
add = st.tuples(st.just("add"), asked, st.integers(-1, 1))
action = st.one_of(
    add,
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("fork"), st.integers(0, 30)),
    st.tuples(st.just("reset")),
)
scripts = st.tuples(st.lists(add, min_size=2, max_size=6), st.lists(action, max_size=20)).map(
    lambda two: two[0] + two[1]
)
shapes = st.tuples(
    st.sampled_from([1, 2, 4, 6, 8]),  # max_num_seqs
    st.sampled_from([8, 13, 24, 60]),  # max_num_batched_tokens
    st.sampled_from([0, 0, 1, 2, 5, 14]),  # blocks beyond those that the longest request needs
    st.sampled_from([16, 16, 32]),
    st.sampled_from([True, True, True, False]),  # enable_prefix_caching
)
Shape = tuple[int, int, int, int, bool]


class Cold:
    """What each request gets alone, in an engine of its own; kept, for many examples ask the same."""

    def __init__(self, model: CausalLM, ops: NativeOps, kv_format: str = "bf16") -> None:
        self.model, self.ops, self.kv_format = model, ops, kv_format
        self.num_groups = len(model.kv_groups(kv_format))
        self._known: dict[Asked, Answer] = {}

    def answer(self, wanted: Asked) -> Answer:
        if wanted not in self._known:
            engine = Engine(self.model, self.ops, self.kv_format, num_blocks=8 * self.num_groups)
            self._known[wanted] = engine.ask("cold", wanted.prompt, PARAMS[wanted.params], seed=wanted.seed)
        return self._known[wanted]


def large(*values: str) -> list[ParameterSet]:
    return [pytest.param(value, marks=pytest.mark.large) for value in values]


@pytest.fixture(scope="module", params=["bf16", *large("f32", "int8", "int4")])
def cold(llama: Path, request: pytest.FixtureRequest) -> Cold:
    ops = NativeOps(2)
    return Cold(load_model(open_model(llama), ops, request.param), ops)


def play(cold: Cold, shape: Shape, script: list[tuple]) -> Engine:
    """Run a script and compare every answer, whole or cut short, with the cold one. Returns the engine, at rest."""
    max_num_seqs, budget, spare, block_size, caching = shape
    config = SchedulerConfig(max_num_seqs, max(budget, max_num_seqs), enable_prefix_caching=caching)
    num_blocks = (-(-LONGEST // block_size) + spare) * cold.num_groups
    engine = Engine(cold.model, cold.ops, cold.kv_format, block_size=block_size, num_blocks=num_blocks, config=config)
    wanted: dict[str, Wanted] = {}
    for action, *values in script:
        name = f"r{len(wanted)}"
        open_names = [known for known in wanted if engine.answers[known].final is None]
        if action == "add":
            wanted[name] = Wanted(values[0], 0)
            params, seed = PARAMS[values[0].params], values[0].seed
            engine.add(name, values[0].prompt, params, seed=seed, priority=values[1])
        elif action == "step":
            for _ in range(values[0]):
                if engine.core.has_work:
                    engine.step()
        elif action == "abort" and open_names:
            engine.core.abort(open_names[values[0] % len(open_names)])
        elif action == "fork" and open_names:
            fork(engine, open_names[values[0] % len(open_names)], name, wanted)
        elif action == "reset":
            engine.core.reset_prefix_cache()
    engine.run()
    for name, (request, num_given) in wanted.items():
        answer, whole = engine.answers[name], cold.answer(request)
        expected = Answer(whole.token_ids[num_given:], whole.logits[num_given:])
        assert answer.final is not None
        if answer.final.finish_reason == "abort":
            assert_same_start(answer, expected, name)
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        else:
            assert_same(answer, expected, name)
    return engine


class Wanted(NamedTuple):
    asked: Asked
    num_given: int  # tokens of the answer that a branch had from its parent


def fork(engine: Engine, parent: str, name: str, wanted: dict[str, Wanted]) -> None:
    """A twin of a running request: the same seed and position, so it must go on exactly as its parent does."""
    if parent in {request.request_id for request in engine.scheduler.running}:
        asked_for, num_given = wanted[parent]
        twin = Request(name, asked_for.prompt, PARAMS[asked_for.params], seed=asked_for.seed)
        engine.scheduler.fork(parent, twin)
        wanted[name] = Wanted(asked_for, num_given + len(engine.answers[parent].token_ids))


@pytest.fixture(scope="module")
def cold_int4(wide: Path) -> Cold:
    ops = NativeOps(2)
    return Cold(load_model(open_model(wide), ops, "bf16"), ops, "int4")


@given(shape=shapes, script=scripts)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_interleavings_in_int4(cold_int4: Cold, shape: Shape, script: list[tuple]) -> None:
    play(cold_int4, shape, script)


@given(shape=shapes, script=scripts)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_random_interleavings(cold: Cold, shape: Shape, script: list[tuple]) -> None:
    play(cold, shape, script)


@pytest.mark.large
@given(shape=shapes, script=scripts)
@settings(max_examples=3000, deadline=None)
@pytest.mark.timeout(1500)
def test_many_random_interleavings(cold: Cold, shape: Shape, script: list[tuple]) -> None:
    play(cold, shape, script)


def test_an_interleaving_with_everything_in_it(cold: Cold) -> None:
    """The random ones would prove little if hits, copies, preemptions and branches did not occur in them."""
    first, second = Asked(48, 20, 1, 1, 0), Asked(40, 17, 2, 2, 1)
    script = [
        ("add", first, 0),
        ("step", 8),
        ("add", second, 0),
        ("step", 2),
        ("fork", 0),
        ("step", 40),
        *[("add", Asked(0, 15, own_seed, 2, 0), 0) for own_seed in range(3)],
        ("step", 30),
        ("add", Asked(50, 3, 0, 3, 0), -1),
        ("abort", 0),
        ("step", 8),
        ("add", first, 1),
    ]
    engine = play(cold, (5, 24, 0, 16, True), script)
    status = engine.core.status()
    assert status.hit_tokens > 0
    assert status.copies > 0
    assert status.preemptions > 0
    assert status.recomputed_tokens > 0
    assert status.finished["abort"] == 1
    assert max(len(plan.rows) for plan in engine.plans) > 1
