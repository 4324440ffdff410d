"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The real Gemma 3 270M GGUF file, fetched once into the model cache (or OCTAVO_TEST_GEMMA3)."""
    given = os.environ.get("OCTAVO_TEST_GEMMA3")
    if given:
        return Path(given)
    from octavo.cli.model_cache import resolve_model

    return resolve_model("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF file, fetched once into the model cache (or OCTAVO_TEST_SMOLLM2)."""
    given = os.environ.get("OCTAVO_TEST_SMOLLM2")
    if given:
        return Path(given)
    from octavo.cli.model_cache import resolve_model

    return resolve_model("smollm2")
