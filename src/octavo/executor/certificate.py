"""A certificate: the setting of the KV cache that was measured not to hurt a model, and what it holds for.

Its file is JSON and is written by `octavo certify`, with all that was measured; here is what the executor needs of it.
It does not know how anything was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.models.cached_file import write_whole

FILE_KIND = "octavo kv certificate 1"
MAKE_ONE = "make one with `octavo certify MODEL --text FILE`"
_NAME = "kv-certificate"
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CertifiedSetting:
    """The smallest setting that kept within the limits."""

    kv_format: str
    skip_layers: tuple[int, ...]
    scales_digest: str | None
    numerics: str  # see `numerics.numerics`
    name: str  # for people: the formats of the layers


@dataclass(frozen=True, slots=True)
class Certificate:
    """What it was measured for; `setting` None: nothing kept within the limits."""

    model_digest: str
    weights_dtype: str
    max_model_len: int  # the longest text that was measured, in tokens
    text_digest: str
    created: str  # ISO 8601, UTC: the newest goes first
    max_kl: float
    min_top1: float
    setting: CertifiedSetting | None
    path: Path

    def words(self) -> str:
        return f"certified by {self.path.name} (KL at most {self.max_kl:g}, top-1 at least {self.min_top1:g})"

    def as_object(self) -> dict[str, object]:
        return {
            "file": self.path.name,
            "created": self.created,
            "text_digest": self.text_digest,
            "max_model_len": self.max_model_len,
            "max_kl": self.max_kl,
            "min_top1": self.min_top1,
        }


def certificate_name(report: Mapping[str, Any]) -> str:
    """One file for each model, dtype of weights, kernels, length and text: a new measure takes the old one's place."""
    parts = ("model_digest", "weights_dtype", "instruction_set", "max_model_len", "text_digest")
    key = sha256("\n".join(str(report[part]) for part in parts).encode()).hexdigest()
    return f"{_NAME}.{key[:12]}.json"


def folders(model: Path, cache_dir: Path) -> tuple[tuple[Path, str], ...]:
    """Where certificates of a model lie, and how their names begin: beside it, else in the user's cache directory."""
    beside = (model, "") if model.is_dir() else (model.parent, f"{model.name}.")
    return beside, (cache_dir / "certificates" / model.name, "")


def found_files(model: Path, cache_dir: Path) -> list[Path]:
    found = []
    for folder, start in folders(model, cache_dir):
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        found += [folder / name for name in names if name.startswith(f"{start}{_NAME}.") and name.endswith(".json")]
    return found


def digest_of(report: Mapping[str, Any]) -> str:
    """Over everything in the file but the digest itself."""
    kept = {key: value for key, value in report.items() if key != "digest"}
    return sha256(json.dumps(kept, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def write_certificate(path: Path, report: Mapping[str, Any]) -> None:
    """Whole or not at all, with its digest. Raises ConfigError where it cannot be written."""
    whole = {**report, "digest": digest_of(report)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(whole, indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(
            f"the certificate cannot be written to {path} ({error.strerror}); give --output FILE"
        ) from error


def read_certificate(path: Path) -> Certificate:
    """Raises ConfigError, with the file's name and the cure, for what is missing, damaged or something else."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise _damaged(path, f"it has more than {_MAX_FILE_BYTES} bytes")
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the certificate {path} cannot be read ({error.strerror}); {MAKE_ONE}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON ({error})") from error
    if not isinstance(report, dict) or report.get("kind") != FILE_KIND:
        raise _damaged(path, f"it does not say that it is {FILE_KIND!r}")
    if report.get("digest") != digest_of(report):
        raise _damaged(path, "its content is not that of its digest")
    try:
        return _certificate(path, report)
    except (KeyError, TypeError, ValueError) as error:  # a digest over something that was never one
        raise _damaged(path, f"a field is missing or of another type ({error})") from error


def _certificate(path: Path, report: dict[str, Any]) -> Certificate:
    given = report["setting"]
    setting = None
    if given is not None:
        setting = CertifiedSetting(
            kv_format=str(given["kv_cache_dtype"]),
            skip_layers=tuple(int(one) for one in given["skip_layers"]),
            scales_digest=None if given["scales_digest"] is None else str(given["scales_digest"]),
            numerics=str(given["numerics"]),
            name=str(report["chosen"]),
        )
        if setting.kv_format not in FORMAT_BYTES:
            raise ValueError(f"the format {setting.kv_format!r} is not known")
    return Certificate(
        model_digest=str(report["model_digest"]),
        weights_dtype=str(report["weights_dtype"]),
        max_model_len=int(report["max_model_len"]),
        text_digest=str(report["text_digest"]),
        created=str(report["created"]),
        max_kl=float(report["max_kl"]),
        min_top1=float(report["min_top1"]),
        setting=setting,
        path=path,
    )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the certificate {path} is damaged or no such file: {why}; {MAKE_ONE}")
