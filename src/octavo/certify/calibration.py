"""Scales for an 8-bit cache, from what a model writes, and asks for, on a text.

Of the scheme "hadamard", a channel of K is taken less its mean (which no softmax sees, where there are no soft caps and
sinks) and divided by the root of (the size of what is left / that of the queries): then a turned vector, which has the
same error everywhere, costs scores the least (`_balanced`). For int8, which has a scale for each token, that is all;
the channels of a float share one more, which keeps twice the largest number seen below the format's largest, and there
is feedback (`_feedback`).

Of "head" and "channel", a scale must keep the largest number seen below the format's largest. Within that, a float of
few bits is most exact just below a power of two, so of several scales up to twice as large the one with the least
squared error is taken. It does not know files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.certify.text_digest import text_digest
from octavo.errors import ConfigError
from octavo.executor.config import HADAMARD, SCALABLE_FORMATS, SCALE_SCHEMES, schemes_of
from octavo.executor.kv_scales import KVScales
from octavo.executor.one_text import OneText
from octavo.kernels.ops import F32, F64, HeardQueries
from octavo.kv_formats import hadamard
from octavo.kv_formats.feedback import FLOATS
from octavo.kv_formats.small_float import SmallFloat
from octavo.models.families import family_of
from octavo.models.family import CausalLM

TEXT_TOKENS = 1024  # of one piece of the text, read from an empty cache
NUM_TRIED = 8  # scales, from 1 to 2 times the least
TRIED_TOKENS = 64  # of each piece, by which scales are compared: evenly over it
_LEAST = np.float32(2.0**-40)  # of a scale: a channel that is always 0 has one too
_LEAST_SHARE = 1e-6  # of the mean square of a head: what a channel has at least
_LEAST_COST = 1e-4  # of the mean cost: what an error has at least, in any direction
_ROOM = np.float32(2.0)  # for numbers that are larger than those seen


@dataclass(frozen=True, slots=True)
class CalibrationAsk:
    """For what scales are wanted, and what their file will say of them."""

    kv_format: str
    scheme: str
    model_digest: str
    octavo_version: str

    def __post_init__(self) -> None:
        for name, value, known in (
            ("format", self.kv_format, SCALABLE_FORMATS),
            ("scheme", self.scheme, SCALE_SCHEMES),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if self.scheme not in schemes_of(self.kv_format):
            raise ConfigError(
                f"scheme is {self.scheme!r}; {self.kv_format} has a scale for each token and head, and turned heads: "
                f"take {HADAMARD}"
            )


def calibrate(model: CausalLM, token_ids: Sequence[int], ask: CalibrationAsk) -> KVScales:
    """Reads the text twice: for the largest numbers, then for the errors. Raises ConfigError for what has no scales."""
    groups = model.kv_groups("f32")
    if any(group.kind != "pair" for group in groups):
        raise ConfigError(
            "this model keeps latents, which are stored without scales; run it uncalibrated with --kv-cache-scales "
            "none, or choose another --kv-cache-dtype"
        )
    if not token_ids:
        raise ConfigError("the text has no tokens; give one of some thousands")
    size = min(len(token_ids), TEXT_TOKENS, model.config.max_position_embeddings)
    text, pieces = OneText(model, groups, size), [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
    if ask.scheme == HADAMARD:
        found = _of_turned(text, pieces, ask.kv_format, _sees_only_differences(model))
    else:
        found = _Found(_of_floats(text, pieces, ask))
    return KVScales(
        kv_format=ask.kv_format,
        scheme=ask.scheme,
        k=tuple(k for k, _ in found.scales),
        v=tuple(v for _, v in found.scales),
        k_means=tuple(found.k_means),
        k_feedback=tuple(found.k_feedback),
        model_digest=ask.model_digest,
        text_digest=text_digest(token_ids),
        num_tokens=len(token_ids),
        octavo_version=ask.octavo_version,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """As `KVScales` has it, layer by layer."""

    scales: list[tuple[F32, F32]]
    k_means: list[F32] = field(default_factory=list)
    k_feedback: list[F32] = field(default_factory=list)


def _sees_only_differences(model: CausalLM) -> bool:
    """Whether what all scores of a row have in common makes no difference: not with soft caps or sinks."""
    return family_of(model.config).why_uncounted(model.config) is None


def _of_turned(text: OneText, pieces: Sequence[Sequence[int]], kv_format: str, with_means: bool) -> _Found:
    """What the scheme "hadamard" needs."""
    heard = HeardQueries([np.zeros((num_heads, dim, dim)) for num_heads, dim in text.head_shapes])
    sums, squares = ([np.zeros(shape) for shape in text.head_shapes] for _ in range(2))
    num_tokens = 0
    for count, pairs in _read(text, pieces, heard):
        num_tokens += count
        for of_layer, its_squares, (k, _) in zip(sums, squares, pairs, strict=True):
            of_layer += k.sum(axis=1, dtype=np.float64)
            its_squares += np.square(k, dtype=np.float64).sum(axis=1)
    k_means = [np.asarray(of_layer / num_tokens * with_means, np.float32) for of_layer in sums]
    spread = [own / num_tokens - np.square(m, dtype=np.float64) for own, m in zip(squares, k_means, strict=True)]
    queries = [np.diagonal(products, axis1=1, axis2=2) for products in heard.products]
    k_scales = [_balanced(k, q) for k, q in zip(spread, queries, strict=True)]
    means = k_means if with_means else []
    form = FLOATS.get(kv_format)
    if form is None:
        return _Found([(k, np.ones_like(k)) for k in k_scales], means)
    largest: list[tuple[F32, F32]] = [(np.zeros_like(k), np.zeros_like(k)) for k in k_scales]
    for _, pairs in _read(text, pieces):
        for index, (k, v) in enumerate(pairs):
            stored = (k - k_means[index][:, None]) / k_scales[index][:, None]
            turned = hadamard.turn(stored), hadamard.turn(v)
            of_k, of_v = (np.maximum(a, _largest(b, "head")) for a, b in zip(largest[index], turned, strict=True))
            largest[index] = of_k, of_v
    scales = [
        (np.asarray(k * _scale(_ROOM * of_k, form), np.float32), _scale(_ROOM * of_v, form))
        for k, (of_k, of_v) in zip(k_scales, largest, strict=True)
    ]
    feedback = [_feedback(products, k) for products, k in zip(heard.products, k_scales, strict=True)]
    return _Found(scales, means, feedback)


def _balanced(k_squares: F64, q_squares: F64) -> F32:
    """What channels of K are divided by, and those of q multiplied, so that a turned K costs scores least.

    All numbers of a turned vector have the same error e, in proportion to its length. Scores then have, on average,
    e |q'|, with q' = q times the scales: |k'| |q'| is least where mean squares of both are alike in each channel.
    """
    k, q = (x + _LEAST_SHARE * x.mean(axis=1, keepdims=True) + float(_LEAST) for x in (k_squares, q_squares))
    scales = (k / q) ** 0.25
    return np.asarray(scales / np.exp(np.log(scales).mean(axis=1, keepdims=True)), np.float32)


def _feedback(products: F64, k_scales: F32) -> F32:
    """As `kv_formats.feedback` takes it: of each KV head, how the numbers behind make up for an error the best.

    An error e of a stored vector costs the mean of (q' e)^2, with queries q' as they read it: the sum over the numbers
    of d_j (e_j + those before, each times its own share)^2. Each number is rounded to make its term small.
    """
    dim = products.shape[1]
    matrix = hadamard.turn(np.eye(dim, dtype=np.float32)).astype(np.float64)
    found = np.empty(products.shape, np.float32)
    for head, scales in enumerate(k_scales.astype(np.float64)):
        cost = matrix @ (products[head] * np.outer(scales, scales)) @ matrix
        cost += np.eye(dim) * (_LEAST_COST * np.trace(cost) / dim + float(_LEAST))
        lower = np.linalg.cholesky(cost[::-1, ::-1])
        found[head] = np.triu((lower / np.diag(lower))[::-1, ::-1], 1)
    return found


def _of_floats(text: OneText, pieces: Sequence[Sequence[int]], ask: CalibrationAsk) -> list[tuple[F32, F32]]:
    """Of each layer the scales with the least squared error, of the schemes "head" and "channel"."""
    form, scheme = FLOATS[ask.kv_format], ask.scheme
    largest = _largest_of(text, pieces, scheme)
    least = [(_scale(k, form), _scale(v, form)) for k, v in largest]
    errors: list[tuple[F64, F64]] = []
    for count, pairs in _read(text, pieces):
        chosen = np.unique(np.linspace(0, count - 1, TRIED_TOKENS).astype(np.int64))
        found = [
            (_errors(k[:, chosen], scales[0], form, scheme), _errors(v[:, chosen], scales[1], form, scheme))
            for (k, v), scales in zip(pairs, least, strict=True)
        ]
        errors = found if not errors else [(a + c, b + d) for (a, b), (c, d) in zip(errors, found, strict=True)]
    return [(_best(k, a), _best(v, b)) for (k, v), (a, b) in zip(least, errors, strict=True)]


def _read(
    text: OneText, pieces: Sequence[Sequence[int]], heard: HeardQueries | None = None
) -> Iterator[tuple[int, list[tuple[F32, F32]]]]:
    """How many tokens each piece of the text has, and what every layer keeps of them."""
    for piece in pieces:
        logits = text.run(piece, len(piece) - 1, heard)
        if not np.isfinite(logits).all():
            raise ConfigError("the model gives logits that are not finite on this text; check the model and the text")
        yield len(piece), [text.read(index, len(piece)) for index in range(text.num_layers)]


def _largest_of(text: OneText, pieces: Sequence[Sequence[int]], scheme: str) -> list[tuple[F32, F32]]:
    """The largest |K| and |V| of each layer, [num_kv_heads, head_dim]."""
    largest: list[tuple[F32, F32]] = []
    for _, pairs in _read(text, pieces):
        found = [(_largest(k, scheme), _largest(v, scheme)) for k, v in pairs]
        if largest:
            found = [(np.maximum(a, c), np.maximum(b, d)) for (a, b), (c, d) in zip(largest, found, strict=True)]
        largest = found
    return largest


def _largest(x: F32, scheme: str) -> F32:
    """x [num_kv_heads, num_tokens, head_dim] -> [num_kv_heads, head_dim]"""
    of_channel: F32 = np.abs(x).max(axis=1)
    return np.repeat(of_channel.max(axis=1)[:, None], x.shape[2], axis=1) if scheme == "head" else of_channel


def _scale(largest: F32, form: SmallFloat) -> F32:
    """The least scale that clips nothing: rounded up, so that the division never ends above the largest number."""
    above: F32 = np.nextafter(largest / np.float32(form.largest), np.float32(np.inf), dtype=np.float32)
    return np.asarray(np.maximum(above, _LEAST), np.float32)


def _tried() -> F32:
    return (2.0 ** (np.arange(NUM_TRIED) / NUM_TRIED)).astype(np.float32)


def _errors(x: F32, least: F32, form: SmallFloat, scheme: str) -> F64:
    """The squared error that each scale makes, [NUM_TRIED, num_kv_heads, head_dim]."""
    found = []
    for factor in _tried():
        scale = (least * factor)[:, None]
        error = form.decode(form.encode(x / scale)) * scale - x
        found.append(np.square(error, dtype=np.float64).sum(axis=1))
    errors = np.stack(found)
    return np.broadcast_to(errors.sum(axis=2, keepdims=True), errors.shape) if scheme == "head" else errors


def _best(least: F32, errors: F64) -> F32:
    return np.ascontiguousarray(least * _tried()[errors.argmin(axis=0)])
