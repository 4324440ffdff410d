"""Scales of an 8-bit KV cache: what they are, the file that calibrated ones are kept in, and those without a text.

The file is safetensors, so it opens anywhere: `layers.N.k_scales` and `layers.N.v_scales` [num_kv_heads, head_dim], of
the scheme "hadamard" also `layers.N.k_means` alike and, of fp8, `layers.N.k_feedback` [num_kv_heads, head_dim,
head_dim], with what they were made from in its metadata. It does not know how good scales are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError
from octavo.executor.config import HADAMARD, SCALED_FORMATS, WEIGHED_FORMAT, schemes_of
from octavo.kernels.ops import F32, KVLayer
from octavo.models.cached_file import write_whole
from octavo.models.families import family_of
from octavo.models.family import CausalLM

_FILE_KIND = "octavo kv scales 2"
_OLDER_KINDS = ("octavo kv scales 1",)  # before heads were turned: int8 had other scales
_KEYS = ("kind", "format", "scheme", "model_digest", "text_digest", "tokens", "octavo_version", "digest")
_MAX_FILE_BYTES = 256 << 20
_ALLOWED = {
    "k_scales": "a scale that is not finite and above 0",
    "v_scales": "a scale that is not finite and above 0",
    "k_means": "a number that is not finite",
    "k_feedback": "a number that is not finite, or not above the diagonal",
}


@dataclass(frozen=True, slots=True)
class KVScales:
    """What K and V of each layer are divided by before they are stored, and, of scheme "hadamard", turned."""

    kv_format: str  # one of config.SCALABLE_FORMATS
    scheme: str  # one of SCALE_SCHEMES
    k: tuple[F32, ...]  # of each layer [num_kv_heads, head_dim]; of scheme "head" one number for all channels
    v: tuple[F32, ...]
    k_means: tuple[F32, ...]  # of "hadamard", of each layer as k: taken from K first; else, or with soft caps, none
    k_feedback: tuple[F32, ...]  # of fp8 and "hadamard", of each layer [num_kv_heads, head_dim, head_dim]; else none
    model_digest: str
    text_digest: str  # SHA-256 of the token ids that it was calibrated on
    num_tokens: int  # of that text; 0: by the weights alone
    octavo_version: str
    file_name: str = ""  # where they came from; no part of what they are

    @property
    def digest(self) -> str:
        """SHA-256 in hex of all that the bytes of a cache depend on."""
        turned = f" turned, {len(self.k_means)} means" if self.is_turned else ""
        found = sha256(f"{_FILE_KIND} {self.kv_format} {len(self.k)}{turned}".encode())
        for part in (*self.k, *self.v, *self.k_means, *self.k_feedback):
            found.update(f" {part.shape} ".encode())
            found.update(np.ascontiguousarray(part, "<f4").tobytes())
        return found.hexdigest()

    @property
    def is_turned(self) -> bool:
        return self.scheme == HADAMARD

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.k, *self.v, *self.k_means, *self.k_feedback))

    def applied(self, layers: Sequence[KVLayer]) -> tuple[KVLayer, ...]:
        """The layers of a cache with these scales; those that are kept in another format have none."""
        self.check_shapes(layers)
        none = (None,) * len(layers)
        parts = zip(layers, self.k, self.v, self.k_means or none, self.k_feedback or none, strict=True)
        return tuple(
            replace(layer, k_scales=k, v_scales=v, k_means=means, is_turned=self.is_turned, k_feedback=feedback)
            if layer.kv_format == self.kv_format
            else layer
            for layer, k, v, means, feedback in parts
        )

    def check_shapes(self, layers: Sequence[KVLayer]) -> None:
        """Raises ConfigError for scales of a model of another shape."""
        wanted = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        squares = [(num_heads, dim, dim) for num_heads, dim in wanted]
        found = [[part.shape for part in parts] for parts in (self.k, self.v, self.k_means, self.k_feedback)]
        if found == [wanted, wanted, wanted if self.k_means else [], squares if self.k_feedback else []]:
            return
        raise ConfigError(
            f"{self.file_name or 'the KV scales'}: {len(self.k)} layers of the shapes {_shapes(self.k)}, and the model "
            f"has {len(wanted)} of {sorted(set(wanted))}; {_cure(self.kv_format)}"
        )


def scales_by_weights(model: CausalLM, spec: KVSpec) -> KVScales | None:
    """For layers in int8 that are not calibrated, of a model whose weights tell how large channels of K are."""
    if not any(group.kv_format == WEIGHED_FORMAT and group.kind == "pair" for group in spec.groups):
        return None
    found = family_of(model.config).key_scales(model)
    if not found:
        return None
    values = tuple(np.ones_like(part) for part in found)
    return KVScales(WEIGHED_FORMAT, HADAMARD, found, values, (), (), "", "", 0, "")


def scales_in_use(calibrated: KVScales | None, model: CausalLM, spec: KVSpec) -> KVScales | None:
    """What a cache of this model has: the calibrated ones, else what the weights tell."""
    return scales_by_weights(model, spec) if calibrated is None else calibrated


def default_scales_path(model: Path, kv_format: str) -> Path:
    """Beside a model file, or in a model directory."""
    name = _name(kv_format)
    return model / name if model.is_dir() else model.with_name(f"{model.name}.{name}")


def scales_paths(model: Path, kv_format: str, cache_dir: Path) -> tuple[Path, Path]:
    """Where scales of a model are looked for: beside it, else in the user's cache directory, with its certificates."""
    return default_scales_path(model, kv_format), cache_dir / "certificates" / model.name / _name(kv_format)


def _name(kv_format: str) -> str:
    return f"kv-scales.{kv_format}.safetensors"


def write_scales(path: Path, scales: KVScales) -> None:
    """Whole or not at all. Raises ConfigError where it cannot be written."""
    about = {
        "kind": _FILE_KIND,
        "format": scales.kv_format,
        "scheme": scales.scheme,
        "model_digest": scales.model_digest,
        "text_digest": scales.text_digest,
        "tokens": str(scales.num_tokens),
        "octavo_version": scales.octavo_version,
        "digest": scales.digest,
    }
    tensors = {}
    sides = {"k_scales": scales.k, "v_scales": scales.v, "k_means": scales.k_means, "k_feedback": scales.k_feedback}
    for name, parts in sides.items():
        for index, part in enumerate(parts):
            tensors[f"layers.{index}.{name}"] = np.ascontiguousarray(part, np.float32)
    try:
        write_whole(path, save(tensors, about))
    except OSError as error:
        raise ConfigError(f"the scales cannot be written to {path} ({error.strerror}); give --output FILE") from error


def read_scales(path: Path, kv_format: str, model_digest: str) -> KVScales:
    """The scales of this format for this model.

    Raises ConfigError, with the file's name and the cure, for one that is missing, damaged or of something else.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise _damaged(path, kv_format, f"it has {size} bytes, and at most {_MAX_FILE_BYTES} are read")
        with safe_open(path, "np") as file:
            about, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"the KV scales {path} cannot be read ({why}); {_cure(kv_format)}") from error
    except SafetensorError as error:
        raise _damaged(path, kv_format, str(error)) from error
    if about.get("kind") in _OLDER_KINDS:
        raise ConfigError(f"the KV scales {path} are of an older form ({about['kind']!r}); {_cure(kv_format)}")
    if about.get("kind") != _FILE_KIND or not all(key in about for key in _KEYS):
        raise _damaged(path, kv_format, f"it does not say that it is {_FILE_KIND!r}")
    if about["format"] != kv_format:
        raise ConfigError(f"{path} has scales for {about['format']}, not for {kv_format}; {_cure(kv_format)}")
    if about["model_digest"] != model_digest:
        raise ConfigError(
            f"{path} has scales of another model (digest {about['model_digest'][:12]}, and this one's is "
            f"{model_digest[:12]}); {_cure(kv_format)}"
        )
    found = _scales(path, about, tensors)
    if found.digest != about["digest"]:
        raise _damaged(path, kv_format, "its numbers are not those of its digest")
    return found


def _scales(path: Path, about: Mapping[str, str], tensors: Mapping[str, F32]) -> KVScales:
    scheme, kv_format = about["scheme"], about["format"]
    if scheme not in schemes_of(kv_format) or not about["tokens"].isdecimal():
        raise _damaged(path, kv_format, f"scheme {scheme!r}, {about['tokens']!r} tokens")
    sides: dict[str, list[F32]] = {"k_scales": [], "v_scales": [], "k_means": [], "k_feedback": []}
    if scheme != HADAMARD or "layers.0.k_means" not in tensors:
        del sides["k_means"]
    if scheme != HADAMARD or kv_format not in SCALED_FORMATS:
        del sides["k_feedback"]
    for index in range(len(tensors) // len(sides)):
        for side, parts in sides.items():
            name, part = f"layers.{index}.{side}", tensors.get(f"layers.{index}.{side}")
            if part is None or part.dtype != np.float32 or part.ndim != (3 if side == "k_feedback" else 2):
                raise _damaged(path, kv_format, f"{name} is missing or no matrix of f32")
            if not np.isfinite(part).all() or not _is_allowed(side, part):
                raise _damaged(path, kv_format, f"{name} has {_ALLOWED[side]}")
            parts.append(np.ascontiguousarray(part))
    return KVScales(
        kv_format=kv_format,
        scheme=scheme,
        k=tuple(sides["k_scales"]),
        v=tuple(sides["v_scales"]),
        k_means=tuple(sides.get("k_means", ())),
        k_feedback=tuple(sides.get("k_feedback", ())),
        model_digest=about["model_digest"],
        text_digest=about["text_digest"],
        num_tokens=int(about["tokens"]),
        octavo_version=about["octavo_version"],
        file_name=path.name,
    )


def _is_allowed(side: str, part: F32) -> bool:
    if side == "k_feedback":
        return bool((part == np.triu(part, 1)).all())
    return side == "k_means" or bool((part > 0).all())


def _damaged(path: Path, kv_format: str, why: str) -> ConfigError:
    return ConfigError(f"the KV scales {path} are damaged or no such file: {why}; {_cure(kv_format)}")


def _cure(kv_format: str) -> str:
    return f"make them with `octavo calibrate MODEL --text FILE --format {kv_format}`"


def _shapes(parts: Sequence[F32]) -> list[tuple[int, ...]]:
    return sorted({part.shape for part in parts})
