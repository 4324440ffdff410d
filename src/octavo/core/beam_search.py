"""Beam search as a pure function of candidates: which beams go on, which texts are done, when there is nothing to gain.

The rules are those of transformers' `generate(num_beams=width, do_sample=False)`, scores in 32-bit floats as there. It
knows no blocks, no requests and no model.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.step import TokenLogprob

_F32 = struct.Struct("f")
_NOTHING_FOUND = -1.0e9  # the score of a text that has not been found yet


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: beam `parent` of this step, with one token more."""

    parent: int  # index into the beams of this step
    token_id: int
    score: float  # sum of the log-probabilities


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that is done."""

    token_ids: tuple[int, ...]  # with its end token, where it ended by one
    score: float  # sum of the log-probabilities / length ** length_penalty
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True, slots=True)
class BeamRules:
    """`early_stopping`: True ends as soon as `width` texts are done; False when the best beam, at its length, scores
    no better than the worst of them; "never" when it could not at any length.
    """

    width: int
    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    @property
    def num_candidates(self) -> int:
        """Candidates to look at per beam: at least `width` of them do not end, whatever the end tokens score."""
        return max(2, 1 + len(self.end_token_ids)) * self.width


class BeamSearch:
    """One search. It starts with one beam, that of the prompt."""

    __slots__ = ("_beams", "_done", "_length", "is_over", "rules")

    def __init__(self, rules: BeamRules) -> None:
        self.rules = rules
        self.is_over = False
        self._length = 0  # of the beams, in tokens
        self._beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # tokens and score, best first
        # Invariant: at most `width`, best first.
        self._done: list[Hypothesis] = []

    def advance(self, candidates: Sequence[Sequence[TokenLogprob]]) -> list[Continuation]:
        """Take one step: for each beam, its `num_candidates` most likely next tokens, or all there are.

        Returns the beams of the next step, best first; none when the search is over. Among equal scores the lower beam
        goes first, then the lower token id.
        """
        assert not self.is_over
        assert len(candidates) == len(self._beams), (
            f"{len(candidates)} lists of candidates for {len(self._beams)} beams"
        )
        rules = self.rules
        self._length += 1
        found = [
            Continuation(index, candidate.token_id, _f32(score + candidate.logprob))
            for index, ((_, score), of_beam) in enumerate(zip(self._beams, candidates, strict=True))
            for candidate in of_beam
        ]
        found.sort(key=lambda one: (-one.score, one.parent, one.token_id))
        likely = found[: rules.num_candidates]
        for one in likely[: rules.width]:  # what ends further down is not good enough to count
            if self._ends(one):
                self._finish(one)
        going_on = [one for one in likely if not self._ends(one)][: rules.width]
        self.is_over = not going_on or not self._could_improve(going_on[0].score)
        if self.is_over:
            return []
        self._beams = [((*self._beams[one.parent][0], one.token_id), one.score) for one in going_on]
        return going_on

    def best(self, count: int) -> list[Hypothesis]:
        """The best texts that are done, best first."""
        return self._done[:count]

    def _ends(self, one: Continuation) -> bool:
        return one.token_id in self.rules.end_token_ids or self._length >= self.rules.max_tokens

    def _finish(self, one: Continuation) -> None:
        reason = "stop" if one.token_id in self.rules.end_token_ids else "length"
        score = self._normalised(one.score, self._length)
        self._done.append(Hypothesis((*self._beams[one.parent][0], one.token_id), score, reason))
        self._done.sort(key=lambda done: -done.score)  # stable: of equals the one that was done first
        del self._done[self.rules.width :]

    def _could_improve(self, best_score: float) -> bool:
        rules = self.rules
        is_full = len(self._done) == rules.width
        if is_full and rules.early_stopping is True:
            return False
        at_best = rules.max_tokens if rules.early_stopping == "never" and rules.length_penalty > 0.0 else self._length
        return self._normalised(best_score, at_best) > (self._done[-1].score if is_full else _NOTHING_FOUND)

    def _normalised(self, score: float, length: int) -> float:
        return _f32(score / _f32(float(length) ** self.rules.length_penalty))


def _f32(number: float) -> float:
    """The nearest 32-bit float. Of a sum or quotient of two of them it is what 32-bit arithmetic gives."""
    return float(_F32.unpack(_F32.pack(number))[0])
