"""What all tests of the engine have in common."""

from __future__ import annotations

import pytest

from octavo.engine.tokenizer import Tokenizer
from tests.engine.engine_case import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
