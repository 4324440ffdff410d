"""The names of tensors in a file format: a table from a family's own words. It knows no shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Stems, without ".weight" or ".bias"; those of a layer follow `layer`, in which {} is its index."""

    layer: str
    of: Mapping[str, str]  # a family's word -> the file's stem

    def __call__(self, word: str, layer: int | None = None) -> str:
        stem = self.of[word]
        return stem if layer is None else self.layer.format(layer) + stem
