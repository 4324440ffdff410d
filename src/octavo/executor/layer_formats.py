"""The KV format of each layer, as it was asked for, and the KV spec that follows. It allocates nothing."""

from __future__ import annotations

from octavo.core.kv_groups import with_formats
from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError
from octavo.executor.config import ExecutorConfig, resolve_kv_format
from octavo.models.families import family_of
from octavo.models.family import CausalLM


def skipped_formats(config: ExecutorConfig, model_dtype: str, num_layers: int) -> dict[int, str]:
    """The formats of the layers that do not get `kv_cache_dtype`. Raises ConfigError for one that is not there."""
    wrong = [index for index in config.kv_cache_skip_layers if index >= num_layers]
    if wrong:
        raise ConfigError(
            f"--kv-cache-dtype-skip-layers names layer {wrong[0]}; this model's layers go from 0 to {num_layers - 1}"
        )
    return dict.fromkeys(config.kv_cache_skip_layers, resolve_kv_format("auto", model_dtype))


def cache_spec(model: CausalLM, config: ExecutorConfig) -> KVSpec:
    """What decides the size of the model's cache."""
    own = model.config
    groups = model.kv_groups(resolve_kv_format(config.kv_cache_dtype, own.dtype))
    layers = with_formats(groups, skipped_formats(config, own.dtype, own.num_layers))
    return KVSpec(layers, config.block_size, family_of(own).why_uncounted(own))
