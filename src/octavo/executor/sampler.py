"""Logits -> tokens, row by row: what is drawn for a row is a function of its logits and its `SampleSpec` alone.

Order of operations, on a copy of the row: 1. log-probabilities that were asked for, from the raw logits;
2. logit_bias; 3. repetition, frequency and presence penalties; 4. banned ids; 5. greedy: the highest logit, the lowest
id among equals; otherwise 6. temperature, 7. min_p, 8. top_k, 9. top_p (of what top_k left, renormalised), 10. a draw
by inverting the cumulative distribution with `random_stream.uniform(seed, position)`.

At the edge of top_k and top_p equal logits go by id, lowest first, so that exactly as many stay as were asked for.
It does not know what a token means, when a request stops, or what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampledToken, SampleSpec, TokenLogprob
from octavo.executor.random_stream import uniform
from octavo.kernels.ops import F32

I64 = npt.NDArray[np.int64]

_LEAST_TEMPERATURE = 1e-30  # below it a float32 is 0; only equal logits can tell such temperatures apart
_CHUNK = 256  # numbers to a partial sum of the cumulative distribution
_LIKELY = np.float32(2.0**-10)  # weights looked at first, against a highest of 1: mostly all that top_k and top_p keep


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Why no token can be drawn from a row."""

    reason: str


def sample(logits: F32, specs: Sequence[SampleSpec]) -> list[SampledToken | SampleFailure]:
    """One token for each row of logits [len(specs), vocab_size], which are read only."""
    assert len(logits) == len(specs)
    return [_sample_row(row, spec) for row, spec in zip(logits, specs, strict=True)]


def _sample_row(row: F32, spec: SampleSpec) -> SampledToken | SampleFailure:
    failure = fault_of(row, spec)
    if failure is not None:
        return failure
    best = int(row.argmax())  # the first of equals
    params = spec.params
    if params.is_greedy and not _changes_logits(spec):
        return token_of(row, best, params.logprobs)
    changed = change_logits(row, spec) if _changes_logits(spec) else row
    best = int(changed.argmax())
    if not np.isfinite(changed[best]):
        return SampleFailure(
            "no token may be drawn: every token is banned, or bias and penalties leave no finite logit"
        )
    token_id = best if params.is_greedy else _draw(changed, best, spec)
    return token_of(row, token_id, params.logprobs)


def fault_of(row: F32, spec: SampleSpec | None = None) -> SampleFailure | None:
    """What is wrong with a row of logits, or with what is asked of it."""
    # A NaN is the highest for max, and the lowest for min.
    if not (np.isfinite(row.max()) and np.isfinite(row.min())):
        return _non_finite(row)
    for token_id, _ in () if spec is None else spec.params.logit_bias:
        if token_id >= len(row):
            return SampleFailure(
                f"logit_bias names token {token_id}; the model's vocabulary has ids 0 to {len(row) - 1}"
            )
    return None


def _non_finite(row: F32) -> SampleFailure:
    count = int(np.count_nonzero(~np.isfinite(row)))
    return SampleFailure(
        f"the model gave {count} logits of {len(row)} that are not finite numbers; its weights are damaged, or it "
        "overflows in this weights dtype (try --weights-dtype f32 and --kv-cache-dtype f32)"
    )


def _changes_logits(spec: SampleSpec) -> bool:
    params = spec.params
    return bool(params.logit_bias or spec.banned_token_ids) or _has_penalty(params)


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def change_logits(row: F32, spec: SampleSpec) -> F32:
    """Steps 2 to 4, on a copy."""
    changed, params = row.copy(), spec.params
    for token_id, bias in params.logit_bias:
        changed[token_id] += np.float32(bias)
    if _has_penalty(params):
        _penalise(changed, spec)
    banned = [token_id for token_id in spec.banned_token_ids if token_id < len(row)]
    changed[banned] = -np.inf
    return changed


def _penalise(changed: F32, spec: SampleSpec) -> None:
    """Repetition looks at prompt and output, frequency and presence at the output only."""
    params = spec.params
    output_ids, counts = np.unique(np.array(spec.output_token_ids, np.int64), return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(np.array(spec.prompt_token_ids, np.int64), output_ids)
        values, factor = changed[seen], np.float32(params.repetition_penalty)
        with np.errstate(over="ignore"):  # an overflow is found by the caller's check
            changed[seen] = np.where(values > 0, values / factor, values * factor)
    changed[output_ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    changed[output_ids] -= np.float32(params.presence_penalty)


def _draw(logits: F32, best: int, spec: SampleSpec) -> int:
    """Steps 6 to 10."""
    params = spec.params
    weights = logits - logits[best]  # [vocab_size], at most 0
    with np.errstate(over="ignore", under="ignore"):  # a weight of 0 is what an unlikely token has
        if params.temperature != 1.0:
            weights /= np.float32(max(params.temperature, _LEAST_TEMPERATURE))
        np.exp(weights, out=weights)  # in proportion to the probabilities; the highest is 1
    ids: I64 | None = None  # of the tokens that are left, ascending; None: all
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= np.float32(params.min_p))
        weights = weights[ids]
    if 0 < params.top_k < len(weights) or params.top_p < 1.0:
        kept = _truncate(weights, params.top_k, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    index = _invert(weights, uniform(spec.seed, spec.position))
    return index if ids is None else int(ids[index])


def _truncate(weights: F32, top_k: int, top_p: float) -> I64:
    """Indices, ascending, of the weights that top_k and then top_p leave."""
    if 0 < top_k < len(weights):
        highest = _highest(weights, top_k)
        count = _shortest(highest, top_p * float(highest.sum(dtype=np.float64))) if top_p < 1.0 else top_k
    else:
        highest, count = _nucleus(weights, top_p * float(weights.sum(dtype=np.float64)))
    edge = highest[count - 1]
    kept = np.flatnonzero(weights >= edge)
    if len(kept) > count:  # equals at the edge: the lowest indices stay
        equals = np.flatnonzero(weights[kept] == edge)
        kept = np.delete(kept, equals[len(equals) - (len(kept) - count) :])
    return kept


def _highest(weights: F32, count: int) -> F32:
    """The `count` highest weights, descending."""
    likely = weights[weights >= _LIKELY]
    if len(likely) < count:
        likely = np.partition(weights, len(weights) - count)[len(weights) - count :]
    return np.sort(likely)[::-1][:count]


def _nucleus(weights: F32, target: float) -> tuple[F32, int]:
    """The highest weights, descending, and how many of them reach the target together."""
    likely = weights[weights >= _LIKELY]
    if likely.sum(dtype=np.float64) < target:
        likely = weights
    highest = np.sort(likely)[::-1]
    return highest, _shortest(highest, target)


def _shortest(highest: F32, target: float) -> int:
    """How many of the highest weights, at least one, reach the target together."""
    count = int(np.searchsorted(np.cumsum(highest, dtype=np.float64), target, side="left")) + 1
    return min(count, len(highest))


def most_likely(values: F32, count: int) -> I64:
    """Ids of the `count` highest values, highest first, lowest id first among equals."""
    if count < len(values):
        edge = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= edge)
    else:
        ids = np.arange(len(values))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order[:count]]


def _invert(weights: F32, number: float) -> int:
    """The index at which the cumulative distribution of the weights passes number, from [0, 1).

    Partial sums of chunks first: a whole cumulative sum over a vocabulary costs several times as much.
    """
    whole = len(weights) // _CHUNK * _CHUNK
    sums = weights[:whole].reshape(-1, _CHUNK).sum(axis=1, dtype=np.float64)
    sums = np.append(sums, weights[whole:].sum(dtype=np.float64))
    cumulative = np.cumsum(sums)
    target = number * float(cumulative[-1])
    chunk = min(int(np.searchsorted(cumulative, target, side="right")), int(np.flatnonzero(sums)[-1]))
    before = float(cumulative[chunk - 1]) if chunk else 0.0
    inside = weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    cumulative = before + np.cumsum(inside, dtype=np.float64)
    index = min(int(np.searchsorted(cumulative, target, side="right")), int(np.flatnonzero(inside)[-1]))
    return chunk * _CHUNK + index


def token_of(row: F32, token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id)
    highest = row.max()
    shifted = row - highest
    log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
    ids = most_likely(row, min(num_logprobs, len(row))) if num_logprobs else ()
    top = tuple(TokenLogprob(int(i), float(shifted[i]) - log_total) for i in ids)
    return SampledToken(token_id, float(shifted[token_id]) - log_total, top)
