"""How far one set of next-token distributions is from another: Kullback-Leibler divergence in nats, and the best token.

It does not know where logits come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import F32, F64


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference says of some rows."""

    logarithms: F32  # [rows, vocab_size], of probabilities
    probabilities: F32
    best: np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # [rows]

    @classmethod
    def of(cls, logits: F32) -> Expected:
        """logits: changed in place."""
        logarithms = _log_probabilities(logits)
        return cls(logarithms, np.exp(logarithms), logarithms.argmax(axis=1))


@dataclass(frozen=True, slots=True)
class Distance:
    """Of tokens of a text from the reference."""

    num_tokens: int
    kl_mean: float
    kl_p99: float
    top1: float  # share of tokens after which both have the same most likely token
    perplexity: float


class Tally:
    """Collects rows, in whatever order they come."""

    def __init__(self) -> None:
        self._kl: list[F64] = []
        self._same: list[F64] = []
        self._nats: list[F64] = []

    def add(self, logits: F32, expected: Expected, targets: Sequence[int]) -> None:
        """logits: changed in place; targets: the tokens that followed, of the first rows."""
        found = _log_probabilities(logits)
        self._same.append((found.argmax(axis=1) == expected.best).astype(np.float64))
        self._nats.append(-found[np.arange(len(targets)), list(targets)].astype(np.float64))
        np.subtract(expected.logarithms, found, out=found)
        kl = np.einsum("ij,ij->i", found, expected.probabilities, dtype=np.float64)
        self._kl.append(np.maximum(kl, 0.0))  # below 0 it is by rounding alone

    def distance(self) -> Distance:
        kl, nats = np.concatenate(self._kl), np.concatenate(self._nats)
        return Distance(
            num_tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_p99=float(np.quantile(kl, 0.99)),
            top1=float(np.concatenate(self._same).mean()),
            perplexity=float(np.exp(min(nats.mean(), 700.0))) if len(nats) else 0.0,
        )


def _log_probabilities(logits: F32) -> F32:
    """In place."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits
