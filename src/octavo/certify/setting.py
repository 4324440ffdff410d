"""A way to keep K and V that is measured: a format, the layers that it leaves out, its scales. It runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv_groups import format_words
from octavo.core.kv_spec import KVSpec
from octavo.executor.config import ExecutorConfig
from octavo.executor.kv_scales import KVScales
from octavo.executor.layer_formats import cache_spec
from octavo.models.family import CausalLM

REFERENCE = "f32"


@dataclass(frozen=True, slots=True)
class Setting:
    """As `load` would make it of the flags."""

    kv_format: str
    skip_layers: tuple[int, ...]
    scales: KVScales | None
    spec: KVSpec

    @classmethod
    def of(
        cls, model: CausalLM, kv_format: str, scales: KVScales | None = None, skip_layers: tuple[int, ...] = ()
    ) -> Setting:
        """Raises ConfigError for a format that cannot hold the model's heads."""
        config = ExecutorConfig(kv_cache_dtype=kv_format, kv_cache_skip_layers=skip_layers)
        own = scales if scales is not None and scales.kv_format == kv_format else None
        return cls(kv_format, skip_layers, own, cache_spec(model, config))

    @property
    def name(self) -> str:
        return format_words(self.spec.groups)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, what fills blocks up to one size included: what the pool gives up for a token of a long text.

        A block that a text fills and gives up again ("tail") does not count.
        """
        lasting = [group for group in self.spec.groups if group.kind != "tail"]
        return sum(group.bytes_per_token + group.padding_bytes_per_token for group in lasting)
