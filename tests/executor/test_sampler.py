"""The sampler: each step against its meaning, distributions by chi-square with fixed seeds, one row at a time."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampledToken, SampleSpec
from octavo.executor.random_stream import DRAW_KEY, uniform
from octavo.executor.sampler import OpsSampler, SampleFailure, change_logits
from octavo.kernels.draw import invert
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32
from octavo.kernels.reference import ReferenceOps

SAMPLERS = (OpsSampler(ReferenceOps()), OpsSampler(NativeOps(1)))
LOGITS = np.array([2.0, -1.0, 0.5, 3.0, 0.0, 1.0, -3.0, 2.5], np.float32)


def spec(seed: int = 0, position: int = 0, **fields: Any) -> SampleSpec:
    own = {
        name: fields.pop(name)
        for name in ("banned_token_ids", "prompt_token_ids", "output_token_ids")
        if name in fields
    }
    return SampleSpec(SamplingParams(**fields), seed, position, **own)


def sample(logits: F32, specs: list[SampleSpec]) -> list[SampledToken | SampleFailure]:
    """By the native operations, which must do what the numpy definition does."""
    by_numpy, native = (sampler(logits, specs) for sampler in SAMPLERS)
    assert by_numpy == native
    return native


def draw(logits: F32, one: SampleSpec) -> SampledToken:
    (token,) = sample(logits[None], [one])
    assert isinstance(token, SampledToken), token
    return token


def greedy(logits: F32, **fields: Any) -> int:
    return draw(logits, spec(temperature=0.0, **fields)).token_id


def softmax(logits: F32) -> F32:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def reference_distribution(logits: F32, params: SamplingParams) -> np.ndarray:
    """Probabilities by the plainest sort-based reading of temperature, min_p, top_k, top_p."""
    p = softmax((logits.astype(np.float64) / params.temperature).astype(np.float32))
    p = np.where(p < params.min_p * p.max() * (1 - 1e-6), 0.0, p)
    order = np.lexsort((np.arange(len(p)), -logits))
    if params.top_k > 0:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0.0
    return p / p.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "a token was drawn that may not be"
    expected = probabilities[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": -1},
        {"top_k": 100},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_distribution(fields: dict[str, Any]) -> None:
    params, num_draws = SamplingParams(**fields), 4000
    rows = np.tile(LOGITS, (num_draws, 1))
    tokens = sample(rows, [SampleSpec(params, 11, position) for position in range(num_draws)])
    counts = np.bincount([token.token_id for token in tokens], minlength=len(LOGITS))
    statistic, freedom = chi_square(counts, reference_distribution(LOGITS, params))
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_distribution_over_a_large_vocabulary() -> None:
    """Several chunks of the cumulative sum and a remainder; grouped by id, so that each cell is large."""
    logits = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 2
    params = SamplingParams(top_p=0.97)
    tokens = sample(np.tile(logits, (4000, 1)), [SampleSpec(params, 5, position) for position in range(4000)])
    ids = np.array([token.token_id for token in tokens])
    probabilities = reference_distribution(logits, params)
    assert (probabilities[ids] > 0).all()
    cells = np.add.reduceat(probabilities, np.arange(0, 5000, 100))
    statistic, freedom = chi_square(np.bincount(ids // 100, minlength=50), cells)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 7, 255, 256, 257, 1100, 3000]),
    st.floats(0.01, 1.0),
    st.integers(-1, 80),
    st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_what_may_be_drawn_is_what_the_sorted_reading_keeps(
    seed: int, size: int, top_p: float, top_k: int, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(size) * 2, 1).astype(np.float32)  # rounded: many equal logits
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
    kept = reference_distribution(logits, params)
    order = np.lexsort((np.arange(size), -logits))
    tokens = sample(np.tile(logits, (40, 1)), [SampleSpec(params, seed, position) for position in range(40)])
    rank = {int(token_id): index for index, token_id in enumerate(order)}
    limit = int(np.count_nonzero(kept))
    for token in tokens:
        assert rank[token.token_id] <= limit  # one more at most, where a sum lies on the edge of top_p
    if top_k > 0:
        assert max(rank[token.token_id] for token in tokens) < top_k


@pytest.mark.parametrize(
    ("fields", "limit"), [({"top_p": 0.9}, 17_600), ({"top_k": 5000}, 5000), ({"top_k": 5000, "top_p": 0.99}, 5000)]
)
def test_a_long_flat_tail_is_kept_as_far_as_it_was_asked_for(fields: dict[str, Any], limit: int) -> None:
    """Each of 20,000 tokens is 3,000 times less likely than the first, and together they are likelier."""
    logits = np.full(20_001, -8.0, np.float32)
    logits[0] = 0.0
    probabilities = reference_distribution(logits, SamplingParams(**fields))
    found = np.array([draw(logits, spec(seed, **fields)).token_id for seed in range(300)])
    assert abs(np.count_nonzero(found) / 300 - (1 - probabilities[0])) < 0.1
    assert probabilities[found].all()
    assert limit * 0.9 < found.max() < limit


def test_the_largest_random_number_draws_the_last_possible_token() -> None:
    """A product that is rounded up must not lead past the end, to tokens of probability 0."""
    for seed in range(100):
        weights = np.floor(np.random.default_rng(seed).random(700) * 2.0**32)
        weights[600:] = 0.0
        assert invert(weights, 1.0 - 2.0**-53) == 599


def test_the_numbers_are_those_of_the_stream() -> None:
    for seed, position in ((0, 0), (-3, 9), (2**63, 2**20)):
        assert ReferenceOps().uniform_numbers([seed], [position], DRAW_KEY)[0] == uniform(seed, position)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert greedy(np.array([1, 5, 0, 5, 5], np.float32)) == 1
    assert greedy(np.zeros(3, np.float32)) == 0


def test_top_k_keeps_exactly_k_of_equal_logits_lowest_ids_first() -> None:
    logits = np.zeros(10, np.float32)
    found = {draw(logits, spec(seed, top_k=3)).token_id for seed in range(200)}
    assert found == {0, 1, 2}


def test_top_p_of_equal_logits_keeps_lowest_ids() -> None:
    found = {draw(np.zeros(10, np.float32), spec(seed, top_p=0.35)).token_id for seed in range(200)}
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert {draw(LOGITS, spec(seed, temperature=temperature)).token_id for seed in range(20)} == {3}


def test_a_tiny_temperature_still_draws_among_equals() -> None:
    found = {draw(np.array([4, 1, 4], np.float32), spec(seed, temperature=1e-300)).token_id for seed in range(50)}
    assert found == {0, 2}


def test_logit_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    assert greedy(LOGITS, logit_bias=((6, 100.0),)) == 6
    assert {draw(LOGITS, spec(seed, logit_bias=((6, 100.0),))).token_id for seed in range(50)} == {6}
    assert greedy(LOGITS, logit_bias=((3, -100.0),)) == 7
    assert 3 not in {draw(LOGITS, spec(seed, logit_bias=((3, -100.0),))).token_id for seed in range(300)}


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    (failure,) = sample(LOGITS[None], [spec(logit_bias=((8, 1.0),))])
    assert isinstance(failure, SampleFailure)
    assert "token 8" in failure.reason
    assert "0 to 7" in failure.reason


def test_repetition_penalty_reads_prompt_and_output() -> None:
    # 3.0 / 2 = 1.5 and 2.5 / 2 = 1.25 fall below 2.0
    assert greedy(LOGITS, repetition_penalty=2.0, prompt_token_ids=(3,), output_token_ids=(7,)) == 0
    assert greedy(LOGITS, repetition_penalty=2.0, prompt_token_ids=(3,)) == 7


def test_repetition_penalty_lowers_negative_logits_too_and_counts_once() -> None:
    logits = np.array([-1.0, -1.5, -3.0], np.float32)
    assert greedy(logits, repetition_penalty=2.0, output_token_ids=(0,)) == 1  # -1 becomes -2
    assert (
        greedy(logits, repetition_penalty=2.0, output_token_ids=(0, 0, 0), prompt_token_ids=(1, 0)) == 0
    )  # -2, -3, -3


def test_presence_and_frequency_penalties_read_the_output_only() -> None:
    assert greedy(LOGITS, presence_penalty=1.5, prompt_token_ids=(3,)) == 3
    assert greedy(LOGITS, presence_penalty=1.5, output_token_ids=(3,)) == 7
    assert greedy(LOGITS, frequency_penalty=0.3, output_token_ids=(3,)) == 3  # 2.7
    assert greedy(LOGITS, frequency_penalty=0.3, output_token_ids=(3, 3)) == 7  # 2.4
    assert greedy(LOGITS, presence_penalty=-2.0, output_token_ids=(7,)) == 7  # 4.5


@given(
    st.lists(st.integers(0, 7), max_size=20),
    st.lists(st.integers(0, 7), max_size=20),
    st.sampled_from([1.0, 1.3, 0.5]),
    st.sampled_from([0.0, 0.7, -0.3]),
    st.sampled_from([0.0, 0.4, -2.0]),
)
@settings(deadline=None)
def test_penalties_are_those_of_each_token_by_itself(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    """Whatever the order, and however often an id is there; a snapshot is an array or a tuple."""
    fields = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
    expected = LOGITS.copy()
    for token_id in range(8):
        if repetition != 1.0 and token_id in prompt + output:
            value, factor = expected[token_id], np.float32(repetition)
            expected[token_id] = value / factor if value > 0 else value * factor
        if token_id in output:
            expected[token_id] -= np.float32(frequency) * np.float32(output.count(token_id))
            expected[token_id] -= np.float32(presence)
    for kind in (tuple, lambda ids: array("I", ids)):
        one = spec(prompt_token_ids=kind(prompt), output_token_ids=kind(output), **fields)
        assert change_logits(LOGITS, one).tobytes() == expected.tobytes()


def test_banned_tokens_are_never_drawn_even_with_a_bias() -> None:
    assert greedy(LOGITS, banned_token_ids=(3,), logit_bias=((3, 100.0),)) == 7
    assert greedy(LOGITS, banned_token_ids=(3, 7, 999)) == 0  # an id that the model does not have is no fault here
    found = {draw(LOGITS, spec(seed, banned_token_ids=(3,), top_k=2)).token_id for seed in range(100)}
    assert found == {7, 0}


def test_when_every_token_is_banned_the_row_fails() -> None:
    (failure,) = sample(LOGITS[None], [spec(banned_token_ids=tuple(range(8)))])
    assert isinstance(failure, SampleFailure)
    assert "banned" in failure.reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "logprobs": 3}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(value: float, fields: dict[str, Any]) -> None:
    rows = np.stack([LOGITS, LOGITS, LOGITS])
    rows[1, 5] = value
    first, second, third = sample(rows, [spec(**fields), spec(**fields), spec(**fields)])
    assert isinstance(second, SampleFailure)
    assert "1 logits of 8" in second.reason
    assert first == third == draw(LOGITS, spec(**fields))


def test_penalties_that_overflow_fail_alone() -> None:
    logits = np.array([3e38, -3e38, 0], np.float32)
    (failure,) = sample(-logits[None], [spec(repetition_penalty=0.01, output_token_ids=(1,))])
    assert isinstance(failure, SampleFailure)


def test_logprobs_are_of_the_raw_logits() -> None:
    fields: dict[str, Any] = {"logprobs": 3, "logit_bias": ((6, 100.0),), "top_k": 1}
    token = draw(LOGITS, spec(temperature=5.0, **fields))
    expected = np.log(softmax(LOGITS))
    assert token.token_id == 6
    assert token.logprob == pytest.approx(expected[6], abs=1e-6)
    assert [top.token_id for top in token.top_logprobs] == [3, 7, 0]
    assert [top.logprob for top in token.top_logprobs] == pytest.approx([expected[i] for i in (3, 7, 0)], abs=1e-6)


def test_logprobs_0_gives_the_chosen_one_and_none_gives_nothing() -> None:
    token = draw(LOGITS, spec(temperature=0.0, logprobs=0))
    assert token.logprob == pytest.approx(np.log(softmax(LOGITS))[3], abs=1e-6)
    assert token.top_logprobs == ()
    assert draw(LOGITS, spec(temperature=0.0)).logprob is None


def test_logprobs_of_extreme_logits_are_finite_and_at_most_0() -> None:
    logits = np.array([1e4, -1e4, 3e38 / 1e34, 0], np.float32)
    token = draw(logits, spec(temperature=0.0, logprobs=4))
    assert all(np.isfinite(top.logprob) and top.logprob <= 1e-9 for top in token.top_logprobs)


def test_equal_top_logprobs_come_in_order_of_id() -> None:
    token = draw(np.array([1, 2, 2, 2, 0], np.float32), spec(temperature=0.0, logprobs=2))
    assert [top.token_id for top in token.top_logprobs] == [1, 2]


def test_more_logprobs_than_tokens_gives_all() -> None:
    assert len(draw(LOGITS[:3], spec(temperature=0.0, logprobs=20)).top_logprobs) == 3


MIXED = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "logprobs": 5},
    {"top_k": 40, "temperature": 1.3},
    {"min_p": 0.1, "frequency_penalty": 0.5, "output_token_ids": (1, 2, 2)},
    {"temperature": 0.0, "repetition_penalty": 1.2, "prompt_token_ids": (4, 5)},
]


def test_a_row_does_not_depend_on_its_batch_or_its_place_in_memory() -> None:
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((12, 3001)) * 3).astype(np.float32)  # an odd width: every row at another alignment
    specs = [spec(seed=i, position=i * 3, **MIXED[i % len(MIXED)]) for i in range(12)]
    together = sample(rows, specs)
    order = rng.permutation(12)
    shuffled = sample(np.ascontiguousarray(rows[order]), [specs[i] for i in order])
    assert [together[i] for i in order] == shuffled
    for row, one, token in zip(rows, specs, together, strict=True):
        assert draw(row.copy(), one) == token


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    logits = np.zeros(50_000, np.float32)
    first = draw(logits, spec(seed=3, position=9)).token_id
    assert draw(logits, spec(seed=3, position=9)).token_id == first
    others = {draw(logits, spec(seed=s, position=p)).token_id for s, p in ((3, 10), (4, 9), (9, 3), (-3, 9))}
    assert first not in others
    assert len(others) == 4


def test_golden_draws() -> None:
    """Changes here change every seeded answer of every user."""
    rows = np.tile(np.linspace(-2, 2, 1000, dtype=np.float32), (6, 1))
    specs = [spec(seed=42, position=i, top_p=0.9) for i in range(3)] + [spec(seed=42, position=i) for i in range(3)]
    assert [token.token_id for token in sample(rows, specs)] == GOLDEN_DRAWS


def test_the_logits_are_not_changed() -> None:
    rows = np.tile(LOGITS, (len(MIXED), 1))
    rows.setflags(write=False)
    sample(rows, [spec(**fields) for fields in MIXED])
    assert (rows == LOGITS).all()


def test_no_rows() -> None:
    assert sample(np.empty((0, 8), np.float32), []) == []


GOLDEN_DRAWS = [884, 976, 946, 867, 973, 940]
