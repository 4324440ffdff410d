"""What can be asked of the executor, and what "auto" comes to. It does not know the machine."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.errors import ConfigError
from octavo.models.packed_size import WEIGHTS_DTYPES

CERTIFIED = "certified"  # the smallest setting of a certificate
KV_CACHE_DTYPES = (*FORMAT_BYTES, CERTIFIED)
SCALED_FORMATS = ("fp8_e4m3", "fp8_e5m2")  # KV formats that want calibrated scales
WEIGHED_FORMAT = "int8"  # one that has scales of keys by the weights alone, where those tell them
SCALABLE_FORMATS = (*SCALED_FORMATS, WEIGHED_FORMAT)  # those that can have some
# How scales are found: one for each head, or for each channel, by what is stored alone; or for channels of K by what it
# costs to be wrong there, with heads turned (`kv_formats.hadamard`) before they are rounded.
HADAMARD = "hadamard"
SCALE_SCHEMES = (HADAMARD, "head", "channel")  # the first is the best

BLOCK_STEP, MAX_BLOCK_SIZE = 16, 256
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """How the model is held and run."""

    weights_dtype: str = "auto"  # auto (see `models.packed_size.resolve_weights_dtype`), f32, bf16, int8 or int4
    kv_cache_dtype: str = "auto"  # auto (the model's own; bf16 where it is quantised) or one of KV_CACHE_DTYPES
    kv_cache_skip_layers: tuple[int, ...] = ()  # indices of layers whose K and V are kept as auto would have them
    kv_cache_scales: str | None = None  # of fp8 or int8: a file, or none (uncalibrated); None: the file by the model
    certificate: str | None = None  # the file that kv_cache_dtype certified goes by; None: the newest that matches
    kv_cache_memory: int | None = None  # bytes of the block pool; None: see `memory.default_budget_bytes`
    block_size: int = 16  # tokens; a multiple of 16, at most 256
    threads: int = 0  # 0: one per core that this process may use
    instruction_set: str = "auto"  # auto, or one of kernels.native.supported_instruction_sets()

    def __post_init__(self) -> None:
        _check_choice("weights_dtype", self.weights_dtype, WEIGHTS_DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if any(index < 0 for index in self.kv_cache_skip_layers):
            raise ConfigError(f"kv_cache_skip_layers has {min(self.kv_cache_skip_layers)}; layers are counted from 0")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ConfigError(f"kv_cache_memory is {self.kv_cache_memory}; it must be at least 1 byte (512MiB, say)")
        if self.block_size % BLOCK_STEP or not BLOCK_STEP <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(
                f"block_size is {self.block_size}; it must be a multiple of {BLOCK_STEP} from {BLOCK_STEP} to "
                f"{MAX_BLOCK_SIZE} (16 shares prefixes best)"
            )
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(
                f"threads is {self.threads}; it must be from 1 to {MAX_THREADS}, or 0 for one per core that may be used"
            )


def schemes_of(kv_format: str) -> tuple[str, ...]:
    """Those that a format may have; int8 is turned always."""
    return SCALE_SCHEMES if kv_format in SCALED_FORMATS else (HADAMARD,)


def resolve_kv_format(asked: str, model_dtype: str) -> str:
    """The KV format of a model stored in `model_dtype`."""
    if asked != "auto":
        return asked
    return model_dtype if model_dtype in ("f32", "f16") else "bf16"


def lost_precision(config: ExecutorConfig, model_dtype: str) -> tuple[str, ...]:
    """What `auto` cannot give to a model in f16."""
    found: list[str] = []
    if model_dtype == "f16" and config.weights_dtype == "auto":
        found.append("weights_dtype is bf16: the model's own f16 is not offered (f32 keeps every bit)")
    return tuple(found)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value != "auto" and value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of auto, {', '.join(choices)}")
