"""Which format each layer gets, and what is refused."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.executor.config import ExecutorConfig
from octavo.executor.layer_formats import skipped_formats


def test_skipped_layers_have_what_auto_would_give() -> None:
    config = ExecutorConfig(kv_cache_dtype="int8", kv_cache_skip_layers=(0, 2))
    assert skipped_formats(config, "q4_1", 3) == {0: "bf16", 2: "bf16"}
    assert skipped_formats(config, "f16", 3) == {0: "f16", 2: "f16"}
    assert skipped_formats(ExecutorConfig(), "f16", 3) == {}
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype-skip-layers names layer 2; .* go from 0 to 1"):
        skipped_formats(config, "f32", 2)
