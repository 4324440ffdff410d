"""In what K and V are kept, and on whose word: the format that was asked for, and the scales that go with it.

It does not know the pool, nor how a format was found to be good enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from octavo.errors import ConfigError
from octavo.executor.config import SCALED_FORMATS, ExecutorConfig, resolve_kv_format
from octavo.executor.kv_scales import KVScales, default_scales_path, read_scales

UNCALIBRATED = "none"  # the value of kv_cache_scales that asks for it by name


class Model(Protocol):
    """What must be known of a model (`models.loader.ModelSource` is one)."""

    @property
    def path(self) -> Path: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class KVSetting:
    """What `load` gives the cache."""

    kv_format: str
    scales: KVScales | None = None

    @property
    def is_uncalibrated(self) -> bool:
        return self.kv_format in SCALED_FORMATS and self.scales is None

    def key_name(self, formats: str) -> str:
        """The KV format as a field of block keys: with other scales it is another one.

        formats: of the layers, as `core.kv_groups.format_words` names them.
        """
        return formats if self.scales is None else f"{formats}, scales {self.scales.digest}"

    @property
    def degraded(self) -> tuple[str, ...]:
        if not self.is_uncalibrated:
            return ()
        return (
            f"kv_cache_dtype {self.kv_format} is not calibrated, as --kv-cache-scales {UNCALIBRATED} asks: its scale "
            "is 1 for every head",
        )

    def words(self) -> str:
        """For the boot log, after the name of the format."""
        if self.scales is None:
            return ", uncalibrated" if self.is_uncalibrated else ""
        return (
            f" with the scales of {self.scales.file_name} (by {self.scales.scheme}, digest {self.scales.digest[:12]}, "
            f"calibrated on {self.scales.num_tokens} tokens)"
        )

    def as_object(self) -> dict[str, object]:
        """For `/v1/kv/status`."""
        return {"scales": self._scales_object()}

    def _scales_object(self) -> object:
        found = self.scales
        if found is None:
            return UNCALIBRATED if self.is_uncalibrated else None
        return {
            "file": found.file_name,
            "scheme": found.scheme,
            "digest": found.digest,
            "text_digest": found.text_digest,
            "tokens": found.num_tokens,
            "octavo_version": found.octavo_version,
            "bytes": found.num_bytes,
        }


def text_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 in hex of a text as the model reads it."""
    return sha256(b"".join(one.to_bytes(4, "little") for one in token_ids)).hexdigest()


def kv_setting(config: ExecutorConfig, model: Model, model_dtype: str) -> KVSetting:
    """What the config comes to for this model. Raises ConfigError, with the cure, where scales are missing or wrong."""
    kv_format = resolve_kv_format(config.kv_cache_dtype, model_dtype)
    return KVSetting(kv_format, scales_for(kv_format, config.kv_cache_scales, model))


def scales_for(kv_format: str, asked: str | None, model: Model) -> KVScales | None:
    """asked: `ExecutorConfig.kv_cache_scales`."""
    if kv_format not in SCALED_FORMATS:
        if asked is not None:
            raise ConfigError(
                f"--kv-cache-scales {asked} goes with {' and '.join(SCALED_FORMATS)}, and the KV cache is in "
                f"{kv_format}; leave it out, or choose one of them with --kv-cache-dtype"
            )
        return None
    if asked == UNCALIBRATED:
        return None
    path = default_scales_path(model.path, kv_format) if asked is None else Path(asked)
    if asked is None and not path.exists():
        raise ConfigError(
            f"--kv-cache-dtype {kv_format} wants calibrated scales, and there are none at {path}; make them with "
            f"`octavo calibrate MODEL --text FILE --format {kv_format}`, or run uncalibrated with --kv-cache-scales "
            f"{UNCALIBRATED}"
        )
    return read_scales(path, kv_format, model.digest)
