"""Beam search by hand: which beams go on, what is done, when it ends. Against transformers: tests/e2e."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from octavo.core.beam_search import BeamRules, BeamSearch, Continuation, Hypothesis
from octavo.core.step import TokenLogprob

EOS = 9


def likely(*pairs: tuple[int, float]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, logprob) for token_id, logprob in pairs]


def test_the_first_step_makes_beams_of_one() -> None:
    search = BeamSearch(BeamRules(2, 5))
    assert search.rules.num_candidates == 4
    beams = search.advance([likely((4, -0.5), (7, -1.0), (1, -2.0), (2, -3.0))])
    assert beams == [Continuation(0, 4, -0.5), Continuation(0, 7, -1.0)]


def test_beams_compete_by_the_sum() -> None:
    search = BeamSearch(BeamRules(2, 5))
    search.advance([likely((4, -0.5), (7, -1.0), (1, -2.0), (2, -3.0))])
    beams = search.advance([likely((1, -2.0), (2, -3.0)), likely((5, -0.25), (6, -0.5))])
    assert beams == [Continuation(1, 5, -1.25), Continuation(1, 6, -1.5)], "both go on from the second"


def test_equal_sums_go_by_beam_and_then_by_token() -> None:
    search = BeamSearch(BeamRules(2, 5))
    search.advance([likely((7, -1.0), (4, -1.0), (1, -2.0), (2, -3.0))])
    beams = search.advance([likely((8, -1.0), (3, -1.0)), likely((2, -1.0), (1, -1.0))])
    assert [(one.parent, one.token_id) for one in beams] == [(0, 3), (0, 8)]


def test_an_end_counts_only_among_the_best() -> None:
    """The third best is an end token: it is neither done nor a beam."""
    search = BeamSearch(BeamRules(2, 5, frozenset([EOS])))
    beams = search.advance([likely((4, -0.5), (7, -1.0), (EOS, -2.0), (2, -3.0))])
    assert [one.token_id for one in beams] == [4, 7]
    assert search.best(2) == []


def test_an_end_token_takes_no_beam() -> None:
    search = BeamSearch(BeamRules(2, 5, frozenset([EOS])))
    beams = search.advance([likely((EOS, -0.5), (7, -1.0), (4, -2.0), (2, -3.0))])
    assert [one.token_id for one in beams] == [7, 4]
    assert search.best(2) == [Hypothesis((EOS,), -0.5, "stop")]


def test_more_end_tokens_need_more_candidates() -> None:
    assert BeamRules(3, 5, frozenset([7, 8, 9])).num_candidates == 12
    assert BeamRules(3, 5).num_candidates == 6


def test_the_last_token_ends_all() -> None:
    search = BeamSearch(BeamRules(2, 1))
    assert search.advance([likely((4, -0.5), (7, -1.0), (1, -2.0), (2, -3.0))]) == []
    assert search.is_over
    assert search.best(2) == [Hypothesis((4,), -0.5, "length"), Hypothesis((7,), -1.0, "length")]


@pytest.mark.parametrize(("penalty", "divisor"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 0.5), (2.0, 4.0)])
def test_a_score_is_a_sum_over_a_power_of_the_length(penalty: float, divisor: float) -> None:
    search = BeamSearch(BeamRules(1, 2, length_penalty=penalty))
    search.advance([likely((4, -0.5), (7, -1.0))])
    search.advance([likely((4, -0.75), (7, -1.0))])
    assert search.best(1) == [Hypothesis((4, 4), -1.25 / divisor, "length")]


def finish_both(early_stopping: bool | str, penalty: float = 1.0) -> BeamSearch:
    """Two texts end in the second step, at -0.6 and -0.7 in sum; the best beam that is left stands at -1."""
    search = BeamSearch(BeamRules(2, 50, frozenset([EOS]), penalty, early_stopping))
    search.advance([likely((4, -0.5), (7, -0.5), (1, -2.0), (2, -3.0))])
    search.advance([likely((EOS, -0.1), (5, -0.5), (1, -9.0), (2, -9.0)), likely((EOS, -0.2), (6, -9.0), (1, -9.5))])
    return search


def test_early_stopping_ends_when_enough_is_done() -> None:
    assert finish_both(True).is_over
    assert finish_both(True).best(2) == [
        Hypothesis((4, EOS), pytest.approx(-0.3), "stop"),
        Hypothesis((7, EOS), pytest.approx(-0.35), "stop"),
    ]


def test_without_it_the_search_ends_when_the_best_beam_is_worse_as_it_is() -> None:
    assert finish_both(False).is_over, "-1 / 2 is less than -0.35"
    assert not finish_both("never").is_over, "-1 / 50 may still be reached"
    assert finish_both("never", penalty=0.0).is_over, "with no penalty a sum only gets less"


def test_a_better_text_replaces_the_worst() -> None:
    search = finish_both("never")
    search.advance([likely((EOS, -0.01), (1, -9.0), (2, -9.0), (3, -9.0)), likely((1, -9.0), (2, -9.5), (3, -9.5))])
    assert [one.token_ids for one in search.best(2)] == [(4, EOS), (4, 5, EOS)]


def test_sums_are_32_bit_floats() -> None:
    search = BeamSearch(BeamRules(1, 3))
    third = 1 / 3
    search.advance([likely((1, -third), (2, -2.0))])
    (beam,) = search.advance([likely((1, -third), (2, -2.0))])
    assert beam.score == -0.6666666865348816


@pytest.mark.parametrize("seed", range(20))
def test_a_wide_search_is_exhaustive(seed: int) -> None:
    """As wide as there are texts, it finds the best of them all."""
    rng = random.Random(seed)
    vocabulary, length = 3, 3
    table: dict[tuple[int, ...], list[float]] = {}

    def logprobs(text: tuple[int, ...]) -> list[float]:
        if text not in table:
            weights = [rng.random() + 0.01 for _ in range(vocabulary)]
            table[text] = [math.log(weight / sum(weights)) for weight in weights]
        return table[text]

    search = BeamSearch(BeamRules(vocabulary**length, length))
    beams: list[tuple[int, ...]] = [()]
    while not search.is_over:
        found = [likely(*enumerate(logprobs(beam))) for beam in beams]
        beams = [(*beams[one.parent], one.token_id) for one in search.advance(found)]
    every = itertools.product(range(vocabulary), repeat=length)
    sums = {text: sum(logprobs(text[:i])[text[i]] for i in range(length)) / length for text in every}
    expected = sorted(sums, key=lambda text: -sums[text])
    assert [one.token_ids for one in search.best(27)] == expected
    assert search.best(1)[0].score == pytest.approx(sums[expected[0]], rel=1e-6)
