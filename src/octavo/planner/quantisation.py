"""How a file stores its weights: reads the quantisation part of a config, and counts bytes by it.

It knows the names that quantising tools write (`modelopt`, `compressed-tensors`, `fp8`, `mxfp4`, `gptq`, `awq`), not
what the numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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
_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


def quantisation_of(fields: Fields, outer: Fields, companion: Mapping[str, Any] | None) -> Quantisation | None:
    """What config and companion say together; the companion goes first where both speak."""
    given = fields.values.get("quantization_config") or outer.values.get("quantization_config")
    own: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    beside = (companion or {}).get("quantization")
    beside = beside if isinstance(beside, Mapping) else {}
    if not own and not beside:
        return None
    merged = {**own, **{key: value for key, value in beside.items() if value is not None}}
    algorithm = str(merged.get("quant_algo") or merged.get("quant_method") or "").lower()
    scheme = _scheme(algorithm, merged, fields)
    skipped = [
        pattern
        for key in ("ignore", "exclude_modules", "modules_to_not_convert")
        for pattern in merged.get(key) or ()
        if isinstance(pattern, str)
    ]
    named = merged.get("quantized_layers")
    rules: list[tuple[str, str | None]] = [(pattern, None) for pattern in skipped]
    if isinstance(named, Mapping):
        for name, how in named.items():
            rules.append((str(name) + "*", _scheme(str((how or {}).get("quant_algo", "")).lower(), how or {}, fields)))
    return Quantisation(algorithm, scheme, tuple(rules), _kv_format(merged))


def _scheme(algorithm: str, how: Mapping[str, Any], fields: Fields) -> str | None:
    """The storage of a quantised matrix."""
    if "nvfp4" in algorithm:
        return "nvfp4"
    if algorithm == "mxfp4" or "mxfp4" in str(how.get("format", "")):
        return "mxfp4"
    if algorithm == "fp8":
        if fields.values.get("expert_dtype") == "fp4":
            return "fp8-block"
        return "fp8-block" if how.get("weight_block_size") else "fp8"
    if algorithm in ("compressed-tensors", "gptq", "awq"):
        weights = _weights_of(how)
        bits, group = int(weights.get("num_bits") or 4), int(weights.get("group_size") or 128)
        if bits == 8:
            return "fp8" if weights.get("type") == "float" else "int8"
        return "int4-32" if group == 32 else "int4-128"
    if algorithm == "mixed_precision" and how.get("fmt") and how.get("quant_method") == "fp8":
        return "fp8-block"
    return None


def _weights_of(how: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = how.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return weights
    return {"num_bits": how.get("bits", how.get("w_bit", 4)), "group_size": how.get("group_size", 128)}


def _kv_format(merged: Mapping[str, Any]) -> str | None:
    """The format that the file's own scales are for."""
    named = merged.get("kv_cache_quant_algo") or merged.get("kv_cache_scheme")
    if isinstance(named, Mapping):
        named = "FP8" if named.get("num_bits") == 8 and named.get("type") == "float" else None
    return "fp8" if isinstance(named, str) and named.upper() == "FP8" else None


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    stars = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", _PREFIX.sub("", pattern)))
    return re.compile(stars + r"($|\.)")


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
    short = _PREFIX.sub("", name).removesuffix(".weight")
    for pattern, storage in quantised.rules:
        if _pattern(pattern).match(short if not pattern.startswith("re:") else name):
            return storage
    return quantised.scheme
