"""The digest of a weight file: which bytes it sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.models.safetensors_file import SafetensorsFiles
from octavo.models.tensor_file import tensors_digest
from tests.models.tiny_models import F32, write_safetensors

SAMPLES = [sample * (200_000 - 4096) // 7 for sample in range(8)]  # where 4 KiB are read of a tensor of 200,000 bytes


def digest_of(directory: Path, values: F32, name: str = "x") -> str:
    write_safetensors(directory / "model.safetensors", {name: values, "small": np.ones(9, np.float32)}, "f32")
    return tensors_digest(SafetensorsFiles(directory)).hexdigest()


def test_every_sample_counts(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    seen = {digest_of(tmp_path, values)}
    for start in SAMPLES:
        for byte in (start, start + 4095):
            changed = values.copy()
            changed.view(np.uint8)[byte] ^= 1
            seen.add(digest_of(tmp_path, changed))
    assert len(seen) == 17


def test_names_and_shapes_count(tmp_path: Path) -> None:
    values = np.zeros(50_000, np.float32)
    digests = [
        digest_of(tmp_path, values),
        digest_of(tmp_path, values.reshape(100, 500)),
        digest_of(tmp_path, values, "y"),
        digest_of(tmp_path, np.zeros(50_001, np.float32)),
    ]
    assert len(set(digests)) == 4
    assert digest_of(tmp_path, values) == digests[0]
