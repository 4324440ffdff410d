"""Logits -> tokens, row by row: what is drawn for a row is a function of its logits and its `SampleSpec` alone.

Order of operations, on a copy of the row: 1. log-probabilities that were asked for, from the raw logits;
2. logit_bias; 3. repetition, frequency and presence penalties; 4. banned ids; 5. greedy: the highest logit, the lowest
id among equals; otherwise 6. temperature, 7. min_p, 8. top_k, 9. top_p (of what is left, renormalised), 10. a draw by
inverting the cumulative distribution with `random_stream.uniform(seed, position)`.

At the edge of top_k and top_p equal weights go by id, lowest first, so that exactly as many stay as were asked for.
Steps 5 to 10 are `Ops.draw`, for all rows of a step in one call. This file does not know what a token means, when a
request stops, or what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.core.step import SampledToken, SampleSpec, TokenLogprob
from octavo.executor.random_stream import DRAW_KEY
from octavo.kernels.ops import F32, F64, I32, Ops

I64 = npt.NDArray[np.int64]

NO_LOGIT_LEFT = "no token may be drawn: every token is banned, or bias and penalties leave no finite logit"


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """Why no token can be drawn from a row."""

    reason: str


class OpsSampler:
    """`model_executor.Sampler` by the operations of the kernels."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, logits: F32, specs: Sequence[SampleSpec]) -> list[SampledToken | SampleFailure]:
        """One token for each row of logits [len(specs), vocab_size], which are read only."""
        assert len(logits) == len(specs)
        if not specs:
            return []
        settings = self._settings(specs)
        changing = [index for index, spec in enumerate(specs) if _changes_logits(spec)]
        of_changed = settings[changing]
        if changing:
            settings[changing] = 0.0  # these rows are only checked; what is drawn comes from the changed ones
        found = self._draw(logits, np.arange(len(specs), dtype=np.int32), settings, must_be_finite=True).tolist()
        tokens = [
            _non_finite(row) if token_id < 0 else token_of(row, token_id, spec.params.logprobs)
            for row, spec, token_id in zip(logits, specs, found, strict=True)
        ]
        for index, settled in zip(changing, of_changed, strict=True):
            if found[index] >= 0:
                tokens[index] = self._sample_changed(logits[index], specs[index], settled)
        return tokens

    def _sample_changed(self, row: F32, spec: SampleSpec, settings: F64) -> SampledToken | SampleFailure:
        failure = _foreign_bias(row, spec)
        if failure is not None:
            return failure
        changed = change_logits(row, spec)
        (token_id,) = self._draw(changed[None], np.zeros(1, np.int32), settings[None], must_be_finite=False).tolist()
        if token_id < 0:
            return SampleFailure(NO_LOGIT_LEFT)
        return token_of(row, token_id, spec.params.logprobs)

    def _draw(self, logits: F32, rows: I32, settings: F64, *, must_be_finite: bool) -> I32:
        out = np.empty(len(rows), np.int32)
        self._ops.draw(logits, rows, settings, must_be_finite, out)
        return out

    def _settings(self, specs: Sequence[SampleSpec]) -> F64:
        """[len(specs), 5], as `Ops.draw` takes them."""
        settings = np.zeros((len(specs), 5))
        drawing = [index for index, spec in enumerate(specs) if not spec.params.is_greedy]
        if drawing:
            chosen = [specs[index] for index in drawing]
            settings[drawing, :4] = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in (s.params for s in chosen)]
            seeds, positions = [spec.seed for spec in chosen], [spec.position for spec in chosen]
            settings[drawing, 4] = self._ops.uniform_numbers(seeds, positions, DRAW_KEY)
        return settings


def fault_of(row: F32, spec: SampleSpec | None = None) -> SampleFailure | None:
    """What is wrong with a row of logits, or with what is asked of it."""
    # A NaN is the highest for max, and the lowest for min.
    if not (np.isfinite(row.max()) and np.isfinite(row.min())):
        return _non_finite(row)
    return None if spec is None else _foreign_bias(row, spec)


def _foreign_bias(row: F32, spec: SampleSpec) -> SampleFailure | None:
    for token_id, _ in spec.params.logit_bias:
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
    return bool(params.logit_bias or spec.banned_token_ids) or params.has_penalty


def change_logits(row: F32, spec: SampleSpec) -> F32:
    """Steps 2 to 4, on a copy."""
    changed, params = row.copy(), spec.params
    for token_id, bias in params.logit_bias:
        changed[token_id] += np.float32(bias)
    if params.has_penalty:
        _penalise(changed, spec)
    banned = [token_id for token_id in spec.banned_token_ids if token_id < len(row)]
    changed[banned] = -np.inf
    return changed


def _penalise(changed: F32, spec: SampleSpec) -> None:
    """Repetition looks at prompt and output, frequency and presence at the output only."""
    params = spec.params
    # An id may be there many times: what is assigned for it is then the same many times, and nobody needs to sort.
    output_ids = np.asarray(spec.output_token_ids, np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.concatenate([np.asarray(spec.prompt_token_ids, np.int64), output_ids])
        values, factor = changed[seen], np.float32(params.repetition_penalty)
        with np.errstate(over="ignore"):  # an overflow is found by the caller's check
            changed[seen] = np.where(values > 0, values / factor, values * factor)
    values = changed[output_ids]
    if params.frequency_penalty != 0.0 and len(output_ids):
        values -= np.float32(params.frequency_penalty) * np.bincount(output_ids)[output_ids].astype(np.float32)
    changed[output_ids] = values - np.float32(params.presence_penalty)


def most_likely(values: F32, count: int) -> I64:
    """Ids of the `count` highest values, highest first, lowest id first among equals."""
    if count < len(values):
        edge = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= edge)
    else:
        ids = np.arange(len(values))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order[:count]]


def token_of(row: F32, token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id)
    highest = row.max()
    shifted = row - highest
    log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
    ids = most_likely(row, min(num_logprobs, len(row))) if num_logprobs else ()
    top = tuple(TokenLogprob(int(i), float(shifted[i]) - log_total) for i in ids)
    return SampledToken(token_id, float(shifted[token_id]) - log_total, top)
