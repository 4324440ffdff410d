"""In what K and V are kept, and on whose word: the format that was asked for or certified, and the scales with it.

It does not know the pool, nor how a format was found to be good enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from octavo.core.kv_spec import KVSpec
from octavo.errors import ConfigError
from octavo.executor.certificate import MAKE_ONE, Certificate, CertifiedSetting, found_files, read_certificate
from octavo.executor.config import (
    CERTIFIED,
    SCALABLE_FORMATS,
    SCALED_FORMATS,
    WEIGHED_FORMAT,
    ExecutorConfig,
    resolve_kv_format,
)
from octavo.executor.kv_scales import KVScales, read_scales, scales_in_use, scales_paths
from octavo.executor.numerics import numerics
from octavo.kernels.ops import Ops
from octavo.kv_formats.hadamard import TURNED_FORMATS
from octavo.models.family import CausalLM

UNCALIBRATED = "none"  # the value of kv_cache_scales that asks for it by name


class Model(Protocol):
    """What must be known of a model (`models.loader.ModelSource` is one)."""

    @property
    def path(self) -> Path: ...
    @property
    def digest(self) -> str: ...
    @property
    def stored_dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Running:
    """How the model will run: what a certificate must have been measured for."""

    ops: Ops
    weights_dtype: str
    max_model_len: int | None  # that was asked for
    cache_dir: Path


@dataclass(frozen=True, slots=True)
class KVSetting:
    """What `load` gives the cache."""

    kv_format: str
    scales: KVScales | None = None
    skip_layers: tuple[int, ...] = ()
    certificate: Certificate | None = None

    def config(self, asked: ExecutorConfig) -> ExecutorConfig:
        """The config with what `certified` came to."""
        if self.certificate is None:
            return asked
        return replace(asked, kv_cache_dtype=self.kv_format, kv_cache_skip_layers=self.skip_layers, certificate=None)

    def scales_of(self, model: CausalLM, spec: KVSpec) -> KVScales | None:
        """As `scales_in_use`."""
        return scales_in_use(self.scales, model, spec)

    def longest_context(self, of_model: int) -> int:
        """Tokens: no longer than what was certified."""
        return of_model if self.certificate is None else min(of_model, self.certificate.max_model_len)

    def key_name(self, formats: str, weights_dtype: str) -> str:
        """The KV format as a field of block keys: with other scales, or from weights held otherwise, it is another one.

        For blocks that leave the process; the pool of a served model has no keys, as all its blocks are of one setting.
        formats: of the layers, as `core.kv_groups.format_words` names them.
        """
        turned = ", turned" if self.kv_format in TURNED_FORMATS else ""  # caches of before were not
        weighed = ", keys weighed" if self.kv_format == WEIGHED_FORMAT and self.scales is None else ""
        found = f"{formats}{turned}{weighed}, weights {weights_dtype}"
        return found if self.scales is None else f"{found}, scales {self.scales.digest}"

    def degraded(self, of_model: int, asked: int | None) -> tuple[str, ...]:
        """of_model: the longest context of the model; asked: the one that was asked for."""
        found = []
        if self.kv_format in SCALED_FORMATS and self.scales is None:
            found.append(
                f"kv_cache_dtype {self.kv_format} is not calibrated, as --kv-cache-scales {UNCALIBRATED} asks: its "
                "scale is 1 for every head"
            )
        if asked is None and self.longest_context(of_model) < of_model:
            found.append(
                f"max_model_len is at most {self.longest_context(of_model)} instead of the model's {of_model}: the "
                "certificate was measured no further (octavo certify --max-model-len)"
            )
        return tuple(found)

    def words(self) -> str:
        """For the boot log, after the name of the format."""
        found = ""
        if self.scales is not None:
            found += (
                f" with the scales of {self.scales.file_name} (by {self.scales.scheme}, digest "
                f"{self.scales.digest[:12]}, calibrated on {self.scales.num_tokens} tokens)"
            )
        elif self.kv_format in SCALED_FORMATS:
            found += ", uncalibrated"
        return found if self.certificate is None else f"{found}, {self.certificate.words()}"

    def as_object(self) -> dict[str, object]:
        """For `/v1/kv/status`."""
        certificate = None if self.certificate is None else self.certificate.as_object()
        return {"scales": self._scales_object(), "certificate": certificate}

    def _scales_object(self) -> object:
        found = self.scales
        if found is None:
            return UNCALIBRATED if self.kv_format in SCALED_FORMATS else None
        return {
            "file": found.file_name,
            "scheme": found.scheme,
            "digest": found.digest,
            "text_digest": found.text_digest,
            "tokens": found.num_tokens,
            "octavo_version": found.octavo_version,
            "bytes": found.num_bytes,
        }


def kv_setting(config: ExecutorConfig, model: Model, running: Running) -> KVSetting:
    """What the config comes to for this model. Raises ConfigError, with the cure, for scales or a certificate that are
    missing or wrong."""
    if config.kv_cache_dtype != CERTIFIED:
        if config.certificate is not None:
            raise ConfigError(f"--certificate {config.certificate} goes with --kv-cache-dtype {CERTIFIED}")
        kv_format = resolve_kv_format(config.kv_cache_dtype, model.stored_dtype)
        scales = scales_for(kv_format, config.kv_cache_scales, model, running.cache_dir)
        return KVSetting(kv_format, scales, config.kv_cache_skip_layers)
    if config.kv_cache_skip_layers:
        raise ConfigError(
            f"--kv-cache-dtype-skip-layers goes with a format, and a certificate brings its own layers; leave it out, "
            f"or choose a format instead of {CERTIFIED}"
        )
    certificate = find_certificate(config, model, running)
    setting = certificate.setting
    assert setting is not None
    scales = None
    if setting.scales_digest is not None or config.kv_cache_scales is not None:
        scales = scales_for(setting.kv_format, config.kv_cache_scales, model, running.cache_dir)
    if (None if scales is None else scales.digest) != setting.scales_digest:
        raise ConfigError(
            f"the certificate {certificate.path} is for scales of digest {(setting.scales_digest or 'none')[:12]}, and "
            f"those that were found have {'none' if scales is None else scales.digest[:12]}; {MAKE_ONE}"
        )
    return KVSetting(setting.kv_format, scales, setting.skip_layers, certificate)


def find_certificate(config: ExecutorConfig, model: Model, running: Running) -> Certificate:
    """The one that was asked for, or the newest that matches. Raises ConfigError that says why each other does not."""
    if config.certificate is not None:
        certificate = read_certificate(Path(config.certificate))
        why = _mismatch(certificate, model, running)
        if why is not None:
            raise ConfigError(f"the certificate {certificate.path} {why}; {MAKE_ONE}")
        return certificate
    certificates, refused = [], []
    for path in found_files(model.path, running.cache_dir):
        try:
            certificates.append(read_certificate(path))
        except ConfigError as error:
            refused.append(str(error).removesuffix(f"; {MAKE_ONE}"))
    for certificate in sorted(certificates, key=lambda one: one.created, reverse=True):
        why = _mismatch(certificate, model, running)
        if why is None:
            return certificate
        is_of_this = (certificate.model_digest, certificate.weights_dtype) == (model.digest, running.weights_dtype)
        if certificate.setting is None and is_of_this:  # an older one may not speak against the newest
            raise ConfigError(
                f"the newest certificate, {certificate.path}, {why}; {MAKE_ONE} "
                "again, or name an older one with --certificate"
            )
        refused.append(f"{certificate.path} {why}")
    reasons = "; ".join(refused) or f"there is none beside {model.path}, nor in {running.cache_dir / 'certificates'}"
    raise ConfigError(f"--kv-cache-dtype {CERTIFIED} has no certificate to go by: {reasons}; {MAKE_ONE}")


def _mismatch(certificate: Certificate, model: Model, running: Running) -> str | None:
    """Why it does not hold here; None: it does."""
    if certificate.model_digest != model.digest:
        return f"is of another model (digest {certificate.model_digest[:12]}, and this one's is {model.digest[:12]})"
    if certificate.weights_dtype != running.weights_dtype:
        return f"is for weights in {certificate.weights_dtype}, and these are in {running.weights_dtype}"
    setting = certificate.setting
    if setting is None:
        return (
            f"found no setting within its limits (KL {certificate.max_kl:g}, top-1 {certificate.min_top1:g}): raise "
            "them, or choose a --kv-cache-dtype"
        )
    if running.max_model_len is not None and running.max_model_len > certificate.max_model_len:
        return (
            f"was measured up to {certificate.max_model_len} tokens, and --max-model-len is {running.max_model_len}: "
            "lower it, or certify with --max-model-len"
        )
    if setting.numerics != setting_numerics(running.ops, running.weights_dtype, setting, model.stored_dtype):
        return "was measured with other kernels or another --instruction-set, which round otherwise"
    return None


def setting_numerics(ops: Ops, weights_dtype: str, setting: CertifiedSetting, model_dtype: str) -> str:
    """The fingerprint of the kernels for the formats of a setting."""
    others = [resolve_kv_format("auto", model_dtype)] if setting.skip_layers else []
    return numerics(ops, weights_dtype, [setting.kv_format, *others])


def scales_for(kv_format: str, asked: str | None, model: Model, cache_dir: Path) -> KVScales | None:
    """asked: `ExecutorConfig.kv_cache_scales`."""
    if kv_format not in SCALABLE_FORMATS:
        if asked is not None:
            raise ConfigError(
                f"--kv-cache-scales {asked} goes with {', '.join(SCALABLE_FORMATS)}, and the KV cache is in "
                f"{kv_format}; leave it out, or choose one of them with --kv-cache-dtype"
            )
        return None
    if asked == UNCALIBRATED:
        return None
    beside, cached = scales_paths(model.path, kv_format, cache_dir)
    path = Path(asked) if asked is not None else cached if cached.exists() and not beside.exists() else beside
    if asked is None and not path.exists():
        if kv_format not in SCALED_FORMATS:
            return None
        raise ConfigError(
            f"--kv-cache-dtype {kv_format} wants calibrated scales, and there are none at {path}; make them with "
            f"`octavo calibrate MODEL --text FILE --format {kv_format}`, or run uncalibrated with --kv-cache-scales "
            f"{UNCALIBRATED}"
        )
    return read_scales(path, kv_format, model.digest)
