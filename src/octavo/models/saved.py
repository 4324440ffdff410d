"""Writes a model as a directory of Hugging Face's form: config.json and one model.safetensors. Knows no family.

A tensor is in memory only while it is written.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.kernels.ops import F32
from octavo.kv_formats import bf16
from octavo.models.safetensors_file import SINGLE_NAME

SAVED_DTYPES: Mapping[str, tuple[str, int]] = {"f32": ("F32", 4), "f16": ("F16", 2), "bf16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    name: str
    shape: tuple[int, ...]
    read: Callable[[], F32]


def write_model(directory: Path, config: Mapping[str, Any], tensors: Sequence[SavedTensor], dtype: str) -> int:
    """Into a directory that is there and has no model yet; gives the bytes of the weights. dtype: of SAVED_DTYPES."""
    stored_name, item_bytes = SAVED_DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + item_bytes * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": stored_name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with (directory / SINGLE_NAME).open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                values = tensor.read()
                assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
                file.write(_encoded(values, dtype))
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ModelError(
            f"the model cannot be written into {directory} ({error.strerror}); it needs {end} bytes in an empty folder"
        ) from error
    return end


def _encoded(values: F32, dtype: str) -> bytes:
    if dtype == "bf16":
        return bf16.to_bits(values).astype("<u2").tobytes()
    return np.ascontiguousarray(values).astype("<f4" if dtype == "f32" else "<f2").tobytes()
