"""From what a user calls a model to its geometry, without its weights: the cheapest place that knows comes first.

A reference is a directory, a config.json, a .gguf file, a short name of `known_models` or a hub id. Standard library
only, but for a GGUF file (numpy reads its arrays) and the hub (its own library).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.models.json_file import read_json
from octavo.planner.config_geometry import attention_name, geometry_of
from octavo.planner.geometry import Geometry, KVGroup, Tensor
from octavo.planner.known_models import known_config, known_names
from octavo.planner.stored_weights import stored_weights

_COMPANION = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Numbers:
    """A model by plain numbers: what its cache needs, and its parameters where they are known."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    hidden_size: int | None = None
    parameters: int | None = None
    window: int | None = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.layers, self.kv_heads, self.head_dim))


def open_geometry(reference: str, *, treat_as: str | None = None) -> Geometry:
    """The geometry of a reference. ModelError for one that names nothing, or that cannot be understood."""
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return _of_directory(path, treat_as)
    if path.is_file():
        return _of_file(path, treat_as)
    if path.suffix in (".json", ".gguf") or reference.startswith((".", "/", "~")):
        raise ModelError(f"there is no file {path}; give a directory, a config.json or a .gguf file")
    known = known_config(reference)
    if known is not None:
        return geometry_of(known, reference, treat_as=treat_as)
    return _of_hub(reference, treat_as)


def _of_directory(path: Path, treat_as: str | None) -> Geometry:
    config = path / "config.json"
    if config.is_file():
        geometry = _of_file(config, treat_as, name=path.resolve().name)
        stored = stored_weights(path)
        if stored is None:
            return geometry
        return replace(geometry, stored_bytes=stored.num_bytes, dtype=stored.main_dtype or geometry.dtype)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _of_file(found[0], treat_as)
    if found:
        raise ModelError(f"{path} has {len(found)} GGUF files; give one of them: {found[0]}")
    raise ModelError(f"{path} has neither a config.json nor a .gguf file; it is not a model directory")


def _of_file(path: Path, treat_as: str | None, name: str | None = None) -> Geometry:
    if path.suffix == ".json":
        return geometry_of(read_json(path), name or _name_of(path), companion=_companion(path), treat_as=treat_as)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a config.json nor a .gguf file; give one of them, or the directory")
    from octavo.planner.gguf_geometry import gguf_geometry  # it needs numpy

    return gguf_geometry(path, treat_as=treat_as)


def _name_of(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def _companion(path: Path) -> Mapping[str, Any] | None:
    """The object of the hf_quant_config.json that belongs to a config: beside it, with the same beginning."""
    if not path.name.endswith("config.json"):
        return None
    beside = path.with_name(path.name.removesuffix("config.json") + _COMPANION)
    return read_json(beside) if beside.is_file() and beside != path else None


def _of_hub(reference: str, treat_as: str | None) -> Geometry:
    repository, _, file = reference.partition(":")
    if repository.count("/") != 1 or not all(repository.split("/")) or file:
        near = difflib.get_close_matches(reference.lower(), known_names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ModelError(
            f"{reference!r} is no directory, no config.json, no .gguf file, no hub id (ORG/NAME) and no short name"
            f"{hint}; short names are {', '.join(known_names())}"
        )
    from octavo.models.hub_headers import fetch_headers

    found = fetch_headers(repository)
    geometry = geometry_of(found.config, reference, companion=found.companion, treat_as=treat_as)
    if not found.stored_parameters:
        return geometry
    return replace(geometry, stored_bytes=_stored_bytes(found.stored_parameters))


def _stored_bytes(counts: Mapping[str, int]) -> int:
    """Bytes of so many numbers of each safetensors dtype, whose name ends in its bits: BF16, F8_E4M3, I32."""
    total = 0
    for dtype, count in counts.items():
        bits = 8 if dtype == "BOOL" else int("".join(each for each in dtype.partition("_")[0] if each.isdigit()) or 8)
        total += count * bits // 8
    return total


def geometry_of_numbers(numbers: Numbers) -> Geometry:
    """A model that is nothing but its numbers. ConfigError where one of the three that a cache needs is missing."""
    missing = [
        flag
        for flag, value in (
            ("--layers", numbers.layers),
            ("--kv-heads", numbers.kv_heads),
            ("--head-dim", numbers.head_dim),
        )
        if value is None
    ]
    if missing or numbers.layers is None or numbers.kv_heads is None or numbers.head_dim is None:
        raise ConfigError(
            f"plain numbers need --layers, --kv-heads and --head-dim; {', '.join(missing)} is missing: give it, or a "
            "MODEL"
        )
    heads = numbers.heads or numbers.kv_heads
    kind = "full" if numbers.window is None else "window"
    group = KVGroup(
        kind if numbers.window is None else f"window-{numbers.window}",
        kind,
        tuple(range(numbers.layers)),
        numbers.kv_heads,
        numbers.head_dim,
        numbers.head_dim,
        window=numbers.window,
    )
    notes = [] if numbers.parameters else ["no --parameters: weights, crossover and speed are not known"]
    return Geometry(
        model="numbers",
        architecture="numbers",
        family="numbers",
        attention=attention_name([group], heads),
        num_layers=numbers.layers,
        hidden_size=numbers.hidden_size or heads * numbers.head_dim,
        num_heads=heads,
        vocab_size=0,
        max_context=1 << 20,
        dtype="bf16",
        groups=(group,),
        tensors=_matrix_of(numbers.parameters),
        score_dim=numbers.head_dim,
        mix_dim=numbers.head_dim,
        notes=tuple(notes),
    )


def _matrix_of(parameters: int | None) -> tuple[Tensor, ...]:
    return () if parameters is None else (Tensor("weights", (parameters,)),)
