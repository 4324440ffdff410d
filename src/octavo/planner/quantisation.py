"""How a file stores its weights: reads the quantisation part of a config, and counts bytes by it.

It knows the names that quantising tools write (`modelopt`, `compressed-tensors`, `fp8`, `mxfp4`, `gptq`, `awq`), not
what the numbers mean.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from octavo.errors import ModelError
from octavo.planner.fields import Fields
from octavo.planner.geometry import Geometry, Quantisation, Tensor

# storage -> (numbers of a block, bytes of a block with its scales). Scales of whole matrices (4 bytes) are left out.
STORAGE: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "fp8": (1, 1),
    "fp8-block": (128 * 128, 128 * 128 + 4),  # one f32 scale per 128 x 128
    "int8": (1, 1),
    "nvfp4": (16, 9),  # 4 bits and one fp8 scale per 16
    "mxfp4": (32, 17),  # 4 bits and one 8-bit exponent per 32
    "int4": (2, 1),  # without scales
    "int4-32": (32, 18),  # 4 bits and one 16-bit scale per 32
    "int4-128": (128, 66),
}
_MAX_PATTERN, _MAX_STARS = 300, 12
_NESTED = re.compile(r"[*+}?]\)[*+{]")  # a repetition of what already repeats
_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


def quantisation_of(fields: Fields, outer: Fields, companion: Mapping[str, Any] | None) -> Quantisation | None:
    """What config and companion say together; the companion goes first where both speak."""
    own = fields.section("quantization_config") or outer.section("quantization_config")
    beside = None if companion is None else Fields(companion, f"{fields.name}: its companion").section("quantization")
    if own is None and beside is None:
        return None
    merged = {**(own.values if own else {})}
    if beside is not None:
        merged |= {key: value for key, value in beside.values.items() if value is not None}
    how = Fields(merged, f"{fields.name}: its quantisation")
    algorithm = str(merged.get("quant_algo") or merged.get("quant_method") or "").lower()[:40]
    skipped = [
        pattern
        for key in ("ignore", "exclude_modules", "modules_to_not_convert")
        for pattern in how.sequence(key) or ()
        if isinstance(pattern, str)
    ]
    rules: list[tuple[str, str | None]] = [(pattern, None) for pattern in skipped]
    named = how.section("quantized_layers")
    for name in named.values if named is not None else ():
        layer = named.section(str(name)) if named is not None else None
        if layer is not None:
            rules.append((f"{name}*", _scheme(layer.text("quant_algo").lower(), layer, fields)))
    for pattern, _ in rules:
        _check_pattern(pattern, how.name)
    return Quantisation(algorithm, _scheme(algorithm, how, fields), tuple(rules), _kv_format(merged))


def _check_pattern(pattern: str, where: str) -> None:
    """Patterns are a stranger's: short, and expressions without a repetition inside a repetition."""
    is_expression = pattern.startswith("re:")
    try:
        is_long = len(pattern) > _MAX_PATTERN or pattern.count("*") > _MAX_STARS
        if is_long or (is_expression and _NESTED.search(pattern)):
            raise ValueError("it is too long, or repeats a repetition")
        if is_expression:
            re.compile(pattern[3:])
    except (ValueError, re.error) as error:
        raise ModelError(f"{where} has the pattern {reprlib.repr(pattern)}, which cannot be used: {error}") from error


def _scheme(algorithm: str, how: Fields, fields: Fields) -> str | None:
    """The storage of a quantised matrix."""
    if "nvfp4" in algorithm:
        return "nvfp4"
    if algorithm == "mxfp4" or "mxfp4" in str(how.get("format")):
        return "mxfp4"
    if algorithm == "fp8":
        if fields.get("expert_dtype") == "fp4":
            return "fp8-block"
        return "fp8-block" if how.get("weight_block_size") else "fp8"
    if algorithm in ("compressed-tensors", "gptq", "awq"):
        bits, group, kind = _weights_of(how)
        if bits == 8:
            return "fp8" if kind == "float" else "int8"
        return "int4-32" if group == 32 else "int4-128"
    if algorithm == "mixed_precision" and how.get("fmt") and how.get("quant_method") == "fp8":
        return "fp8-block"
    return None


def _weights_of(how: Fields) -> tuple[int, int, str]:
    """Bits, numbers of a group and kind of number."""
    groups = how.section("config_groups")
    for name in groups.values if groups is not None else ():
        group = groups.section(str(name)) if groups is not None else None
        weights = group.section("weights") if group is not None else None
        if weights is not None:
            return weights.integer("num_bits", 4), weights.integer("group_size", 128, least=-1), weights.text("type")
    bits = how.integer("bits", how.integer("w_bit", 4))
    return bits, how.integer("group_size", 128, least=-1), ""


def _kv_format(merged: Mapping[str, Any]) -> str | None:
    """The format that the file's own scales are for."""
    named = merged.get("kv_cache_quant_algo") or merged.get("kv_cache_scheme")
    if isinstance(named, Mapping):
        named = "FP8" if named.get("num_bits") == 8 and named.get("type") == "float" else None
    return "fp8" if isinstance(named, str) and named.upper() == "FP8" else None


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns behind each other that say the same storage."""

    storage: str | None
    beginnings: tuple[str, ...]  # of names with a dot behind them: most patterns are a whole name, or one and a star
    expressions: tuple[tuple[re.Pattern[str], bool], ...]  # and whether it is for the whole name, prefixes and all

    def fit(self, name: str, short: str) -> bool:
        if short.startswith(self.beginnings):
            return True
        return any(expression.match(name if whole else short) for expression, whole in self.expressions)


@lru_cache(maxsize=64)
def _compiled(rules: tuple[tuple[str, str | None], ...]) -> tuple[_Patterns, ...]:
    """A config may have thousands of patterns, and a model thousands of matrices: they are compared in one go."""
    found = []
    for storage, group in itertools.groupby(rules, key=lambda rule: rule[1]):
        beginnings: list[str] = []
        expressions: list[tuple[re.Pattern[str], bool]] = []
        for pattern, _ in group:
            short = _PREFIX.sub("", pattern)
            if pattern.startswith("re:"):
                expressions.append((re.compile(pattern[3:]), True))
            elif "*" not in short:
                beginnings.append(f"{short}.")
            elif short.index("*") == len(short) - 1:
                beginnings.append(short[:-1])
            else:
                parts = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", short))
                expressions.append((re.compile(parts + r"($|\.)"), False))
        found.append(_Patterns(storage, tuple(beginnings), tuple(expressions)))
    return tuple(found)


def weight_bytes(geometry: Geometry, dtype: str | None = None) -> int:
    """Bytes of the weights: as the file stores them, or all in one dtype ("f32", "bf16", "f16", a name of STORAGE)."""
    if dtype is None and geometry.stored_bytes is not None:
        return geometry.stored_bytes
    return sum(bytes_by_storage(geometry, dtype).values())


def bytes_by_storage(geometry: Geometry, dtype: str | None = None) -> dict[str, int]:
    """Bytes by how they are stored."""
    found: dict[str, int] = {}
    for tensor in geometry.tensors:
        for storage, parameters in _stored(geometry, tensor, dtype):
            numbers, num_bytes = STORAGE[storage]
            found[storage] = found.get(storage, 0) + -(-parameters * num_bytes // numbers)
    return found


def _stored(geometry: Geometry, tensor: Tensor, dtype: str | None) -> list[tuple[str, int]]:
    if dtype is not None:
        plain = "bf16" if dtype not in ("f32", "f16", "bf16") else dtype
        return [(dtype if tensor.role == "matrix" else plain, tensor.parameters)]
    quantised = geometry.quantisation
    if quantised is None or tensor.role != "matrix":
        return [(geometry.dtype, tensor.parameters)]
    if geometry.given.get("expert_dtype") == "fp4" and ".experts." in tensor.name:
        return [("mxfp4", tensor.parameters)]
    if tensor.name == "lm_head.weight" and not _names_head(quantised):
        return [(geometry.dtype, tensor.parameters)]
    if not quantised.rules:
        return [(quantised.scheme or geometry.dtype, tensor.parameters)]
    each = tensor.parameters // max(1, len(tensor.layers))
    found: dict[str, int] = {}
    for layer in tensor.layers or (0,):
        storage = _storage_of(quantised, tensor.name.replace("{}", str(layer))) or geometry.dtype
        found[storage] = found.get(storage, 0) + each
    return list(found.items())


def _names_head(quantised: Quantisation) -> bool:
    """Heads are left as they are by every tool, unless its list names them."""
    return any("lm_head" in pattern and storage is not None for pattern, storage in quantised.rules)


def _storage_of(quantised: Quantisation, name: str) -> str | None:
    short = _PREFIX.sub("", name).removesuffix(".weight") + "."
    for patterns in _compiled(quantised.rules):
        if patterns.fit(name, short):
            return patterns.storage
    return quantised.scheme
