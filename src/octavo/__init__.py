"""octavo: an LLM inference engine around the KV cache.

The public names load on first use, so that `import octavo` is fast and brings neither numpy nor the kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.config import SchedulerConfig, SchedulerOptions
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.seeds import branch_seed
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.completion import Beam, BeamSearchParams, Completion
    from octavo.engine.config import EngineConfig
    from octavo.errors import (
        CapacityError,
        ConfigError,
        DownloadError,
        EngineOverloadedError,
        EngineStoppedError,
        InvalidRequestError,
        KernelError,
        MemoryBudgetError,
        ModelError,
        OctavoError,
    )
    from octavo.executor.config import ExecutorConfig
    from octavo.llm import LLM, LoadedModel, load

    __version__: str

_MODULES = {
    "LLM": "octavo.llm",
    "Beam": "octavo.engine.completion",
    "BeamSearchParams": "octavo.engine.completion",
    "Completion": "octavo.engine.completion",
    "branch_seed": "octavo.core.seeds",
    "LoadedModel": "octavo.llm",
    "SchedulerOptions": "octavo.core.config",
    "load": "octavo.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "EngineConfig": "octavo.engine.config",
    "SamplingParams": "octavo.core.sampling_params",
    "SchedulerConfig": "octavo.core.config",
    "ExecutorConfig": "octavo.executor.config",
    "OctavoError": "octavo.errors",
    "ConfigError": "octavo.errors",
    "ModelError": "octavo.errors",
    "DownloadError": "octavo.errors",
    "MemoryBudgetError": "octavo.errors",
    "KernelError": "octavo.errors",
    "EngineOverloadedError": "octavo.errors",
    "EngineStoppedError": "octavo.errors",
    "InvalidRequestError": "octavo.errors",
    "CapacityError": "octavo.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Beam",
    "BeamSearchParams",
    "CapacityError",
    "Completion",
    "ConfigError",
    "DownloadError",
    "EngineConfig",
    "EngineOverloadedError",
    "EngineStoppedError",
    "ExecutorConfig",
    "InvalidRequestError",
    "KernelError",
    "LoadedModel",
    "MemoryBudgetError",
    "ModelError",
    "OctavoError",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerOptions",
    "__version__",
    "branch_seed",
    "load",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version("octavo"))
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a checkout that was not installed
