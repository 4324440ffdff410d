"""What every Executor promises the core, whatever it computes with: see core/step.py."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, BranchSample, PromptScores, Row, SampledToken, SampleSpec, StepPlan, StepResult
from tests.contract.executor_cases import EXECUTORS, ExecutorCase

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, logprobs=2)


@pytest.fixture(params=EXECUTORS)
def case(request: pytest.FixtureRequest) -> ExecutorCase:
    return EXECUTORS[request.param]()


def text_of(case: ExecutorCase, length: int, first: int = 1) -> list[int]:
    return [(first + 7 * position) % 12 for position in range(length)]


def tables_of(case: ExecutorCase, block_ids: Sequence[int]) -> tuple[array, ...]:
    """Block tables of all groups; each group has its own blocks."""
    return tuple(
        array("i", [block * case.num_groups + group for block in block_ids]) for group in range(case.num_groups)
    )


def row_of(
    case: ExecutorCase,
    tokens: Sequence[int],
    start: int,
    block_ids: Sequence[int],
    *,
    samples: bool = True,
    request_id: str = "r",
) -> Row:
    spec = SampleSpec(GREEDY, 0, 0) if samples else None
    return Row(request_id, start, tuple(tokens[start:]), tables_of(case, block_ids), spec)


def run(case: ExecutorCase, *rows: Row, copies: tuple[BlockCopy, ...] = ()) -> StepResult:
    return case.executor.execute(StepPlan(1, copies, rows))


def whole(case: ExecutorCase, tokens: Sequence[int], block_ids: Sequence[int], request_id: str = "r") -> SampledToken:
    return run(case, row_of(case, tokens, 0, block_ids, request_id=request_id)).sampled[request_id]


def test_rows_that_sample_get_a_token_and_the_others_none(case: ExecutorCase) -> None:
    size = case.block_size
    one, two = text_of(case, size + 1), text_of(case, 2 * size - 1, 2)
    result = run(
        case,
        row_of(case, one, 0, [0, 1], request_id="one"),
        row_of(case, two, 0, [2, 3], request_id="two", samples=False),
    )
    assert set(result.sampled) == {"one"}
    assert 0 <= result.sampled["one"].token_id < case.vocab_size
    assert result.failed == {}
    assert result.num_tokens == 3 * size


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 17])
def test_chunks_change_nothing(case: ExecutorCase, chunk: int) -> None:
    tokens = text_of(case, 2 * case.block_size + 3)
    expected = whole(case, tokens, [0, 1, 2])
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        result = run(case, row_of(case, tokens[:end], start, [3, 4, 5], samples=end == len(tokens)))
    assert result.sampled["r"] == expected


def test_strangers_in_the_batch_change_nothing(case: ExecutorCase) -> None:
    tokens = text_of(case, 2 * case.block_size + 1)
    expected = whole(case, tokens, [0, 1, 2])
    strangers = [row_of(case, text_of(case, 3 + n, n), 0, [6 + 2 * n, 7 + 2 * n], request_id=f"s{n}") for n in range(4)]
    result = run(case, *strangers[:2], row_of(case, tokens, 0, [3, 4, 5]), *strangers[2:])
    assert result.sampled["r"] == expected
    alone = whole(case, text_of(case, 6, 3), [14, 15], "s3")
    assert result.sampled["s3"] == alone


def test_it_does_not_matter_where_the_blocks_lie(case: ExecutorCase) -> None:
    tokens = text_of(case, 2 * case.block_size + 2)
    assert whole(case, tokens, [0, 1, 2]) == whole(case, tokens, [9, 3, 7])


def test_a_prefix_that_another_request_wrote_is_as_good(case: ExecutorCase) -> None:
    size = case.block_size
    tokens = text_of(case, 2 * size + 3)
    expected = whole(case, tokens, [0, 1, 2])
    run(case, row_of(case, tokens[: 2 * size], 0, [3, 4], request_id="writer"))
    assert run(case, row_of(case, tokens, 2 * size, [3, 4, 5])).sampled["r"] == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_copied_part_of_a_block_is_as_good(case: ExecutorCase, num_tokens: int) -> None:
    """Also where the source is written over in the same step: copies run before any row, in their order."""
    size = case.block_size
    tokens, other = text_of(case, 2 * size), text_of(case, 2 * size, 3)
    expected, expected_other = whole(case, tokens, [0, 1]), whole(case, other, [2, 3])
    run(case, row_of(case, tokens, 0, [4, 5], request_id="writer"))
    run(case, row_of(case, other[: size + 1], 0, [6, 7], request_id="second writer"))

    def copies(source: int, target: int, count: int) -> tuple[BlockCopy, ...]:
        groups = case.num_groups
        return tuple(BlockCopy(source * groups + g, target * groups + g, count) for g in range(groups))

    result = run(
        case,
        row_of(case, tokens, size + num_tokens, [4, 8], request_id="r"),
        row_of(case, other, size + 1, [6, 5], request_id="other"),
        copies=(*copies(5, 8, num_tokens), *copies(7, 5, 1)),
    )
    assert result.sampled == {"r": expected, "other": expected_other}


def test_it_keeps_no_memory_of_requests(case: ExecutorCase) -> None:
    """The same id may mean another text in the next step, and a step can be run again."""
    tokens, other = text_of(case, 6), text_of(case, 6, 3)
    expected, expected_other = whole(case, tokens, [0, 1]), whole(case, other, [2, 3], "other")
    assert whole(case, other, [0, 1]) == expected_other
    assert whole(case, tokens, [0, 1]) == expected
    row = row_of(case, tokens, 5, [0, 1])
    assert run(case, row).sampled == run(case, row).sampled == {"r": expected}


def test_banned_tokens_are_never_drawn(case: ExecutorCase) -> None:
    tokens = text_of(case, 6)
    banned: tuple[int, ...] = ()
    for _ in range(5):
        spec = SampleSpec(GREEDY, 0, 0, banned)
        token = run(case, Row("r", 0, tuple(tokens), tables_of(case, [0, 1]), spec)).sampled["r"].token_id
        assert token not in banned
        banned = (*banned, token)


def test_a_plan_is_only_read(case: ExecutorCase) -> None:
    row = row_of(case, text_of(case, 6), 0, [0, 1])
    before = [table.tolist() for table in row.block_tables]
    run(case, row)
    assert [table.tolist() for table in row.block_tables] == before


# -- branches


def test_branches_draw_from_the_row_as_separate_requests_would(case: ExecutorCase) -> None:
    tokens = text_of(case, case.block_size + 2)
    sampling = SamplingParams(max_tokens=100, temperature=1.5)
    specs = {f"b{seed}": SampleSpec(sampling, seed, 0) for seed in range(6)}
    alone = {
        name: run(case, Row(name, 0, tuple(tokens), tables_of(case, [0, 1]), spec)).sampled[name]
        for name, spec in specs.items()
    }
    first, *others = specs.items()
    branches = tuple(BranchSample(name, spec) for name, spec in others)
    row = Row(first[0], 0, tuple(tokens), tables_of(case, [2, 3]), first[1], branches)
    stranger = row_of(case, text_of(case, 5, 3), 0, [4, 5], request_id="stranger")
    result = run(case, stranger, row)
    assert {name: result.sampled[name] for name in specs} == alone
    assert len({token.token_id for token in alone.values()}) > 1
    without_its_own = Row(first[0], 0, tuple(tokens), tables_of(case, [2, 3]), None, branches)
    assert set(run(case, without_its_own).sampled) == {name for name, _ in others}


def test_candidates_are_the_most_likely_tokens(case: ExecutorCase) -> None:
    tokens = text_of(case, case.block_size + 2)

    def candidates(count: int, banned: tuple[int, ...] = ()) -> list[tuple[int, float]]:
        spec = SampleSpec(GREEDY, 0, 0, banned, num_candidates=count)
        result = run(case, Row("r", 0, tuple(tokens), tables_of(case, [0, 1]), spec))
        assert result.sampled == {}
        return [(one.token_id, one.logprob) for one in result.candidates["r"]]

    every = candidates(1000)
    assert sorted(token_id for token_id, _ in every) == list(range(case.vocab_size))
    assert every == sorted(every, key=lambda one: (-one[1], one[0]))
    assert sum(math.exp(logprob) for _, logprob in every) == pytest.approx(1, rel=1e-5)
    assert candidates(4) == every[:4]
    left = [token_id for token_id, _ in candidates(1000, banned=(every[0][0], every[2][0]))]
    assert left == [token_id for token_id, _ in (every[1], *every[3:])]


def test_the_prompt_is_scored_row_by_row(case: ExecutorCase) -> None:
    """Whole, and in pieces of it that begin inside a row."""
    tokens = text_of(case, 2 * case.block_size + 1)
    targets = (*tokens[1:], 5)

    def scores(start: int, end: int, first: int, table: list[int]) -> tuple[SampledToken, ...]:
        wanted = PromptScores(first, targets[start + first : end], 2)
        row = Row("r", start, tuple(tokens[start:end]), tables_of(case, table), None, prompt_scores=wanted)
        return run(case, row).prompt_scores["r"]

    whole_prompt = scores(0, len(tokens), 0, [0, 1, 2])
    assert [one.token_id for one in whole_prompt] == list(targets)
    assert all(one.logprob is not None and one.logprob < 0 for one in whole_prompt)
    middle = case.block_size - 1
    assert scores(0, middle, 0, [3, 4, 5]) + scores(middle, len(tokens), 0, [3, 4, 5]) == whole_prompt
    assert scores(middle, len(tokens), 2, [3, 4, 5]) == whole_prompt[middle + 2 :]
