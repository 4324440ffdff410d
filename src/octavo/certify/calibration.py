"""Scales for an 8-bit float cache, from what a model writes on a text.

A scale must keep the largest number seen below the format's largest. Within that, a float of few bits is most exact
just below a power of two, so of several scales up to twice as large the one with the least squared error is taken.

int8 has a scale for each token, which a channel of K that is large in every token spoils for the others: there each
channel of K is divided by its largest number, and V is left as it is. It does not know files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.certify.text_digest import text_digest
from octavo.errors import ConfigError
from octavo.executor.config import SCALABLE_FORMATS, SCALE_SCHEMES
from octavo.executor.kv_scales import KVScales
from octavo.executor.one_text import OneText
from octavo.kernels.ops import F32, F64
from octavo.kv_formats.small_float import E4M3, E5M2, SmallFloat
from octavo.models.family import CausalLM

TEXT_TOKENS = 1024  # of one piece of the text, read from an empty cache
NUM_TRIED = 8  # scales, from 1 to 2 times the least
TRIED_TOKENS = 64  # of each piece, by which scales are compared: evenly over it
_FLOATS: dict[str, SmallFloat] = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
_LEAST = np.float32(2.0**-40)  # of a scale: a channel that is always 0 has one too


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
        if self.kv_format not in _FLOATS and self.scheme != "channel":
            raise ConfigError(f"scheme is {self.scheme!r}; {self.kv_format} has a scale for each head: take channel")


def default_scheme(kv_format: str) -> str:
    return "head" if kv_format in _FLOATS else "channel"


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
    largest = _largest_of(text, pieces, ask.scheme)
    best = _of_floats(text, pieces, ask, largest) if ask.kv_format in _FLOATS else [_of_int8(k, v) for k, v in largest]
    return KVScales(
        kv_format=ask.kv_format,
        scheme=ask.scheme,
        k=tuple(k for k, _ in best),
        v=tuple(v for _, v in best),
        model_digest=ask.model_digest,
        text_digest=text_digest(token_ids),
        num_tokens=len(token_ids),
        octavo_version=ask.octavo_version,
    )


def _of_int8(k_largest: F32, v_largest: F32) -> tuple[F32, F32]:
    return np.maximum(k_largest, _LEAST), np.ones_like(v_largest)


def _of_floats(
    text: OneText, pieces: Sequence[Sequence[int]], ask: CalibrationAsk, largest: list[tuple[F32, F32]]
) -> list[tuple[F32, F32]]:
    """Of each layer the scales with the least squared error."""
    form, scheme = _FLOATS[ask.kv_format], ask.scheme
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


def _read(text: OneText, pieces: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[tuple[F32, F32]]]]:
    """How many tokens each piece of the text has, and what every layer keeps of them."""
    for piece in pieces:
        logits = text.run(piece, len(piece) - 1)
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
