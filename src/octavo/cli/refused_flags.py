"""Flags of other engines that octavo does not have: each is refused by name, with what to do instead.

They are hidden from `--help`. It does not know the flags that exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from octavo.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_NO_LORA = "octavo has no LoRA adapters yet: merge the adapter into the model's weights and serve the merged model"
_NO_SPECULATION = "octavo has no speculative decoding yet: leave the flag out"
_ONE_PROCESS = "octavo runs a model in one process on one machine: leave it out or set it to 1, and use --threads"
_NO_QUANTIZATION = (
    "octavo reads GPTQ, AWQ and the like not yet: use a GGUF file (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K), "
    "which carries its own quantisation, or --weights-dtype"
)

# flag -> (takes a value, value that is harmless, why not and what instead)
REFUSED: dict[str, tuple[bool, str | None, str]] = {
    "--quantization": (True, None, _NO_QUANTIZATION),
    "--enable-lora": (False, None, _NO_LORA),
    "--lora-modules": (True, None, _NO_LORA),
    "--max-loras": (True, None, _NO_LORA),
    "--speculative-config": (True, None, _NO_SPECULATION),
    "--speculative-model": (True, None, _NO_SPECULATION),
    "--num-speculative-tokens": (True, "0", _NO_SPECULATION),
    "--tensor-parallel-size": (True, "1", _ONE_PROCESS),
    "--pipeline-parallel-size": (True, "1", _ONE_PROCESS),
    "--data-parallel-size": (True, "1", _ONE_PROCESS),
    "--gpu-memory-utilization": (True, None, "octavo runs on the CPU: set the cache's size with --kv-cache-memory"),
    "--cpu-offload-gb": (True, "0", "octavo keeps weights and cache in main memory: leave the flag out"),
    "--swap-space": (True, "0", "octavo recomputes what it preempts: leave the flag out"),
    "--dtype": (True, "auto", "octavo names them apart: --weights-dtype and --kv-cache-dtype"),
    "--load-format": (True, "auto", "octavo tells the format from the files: leave the flag out"),
    "--tokenizer": (True, None, "octavo takes the tokenizer from the model: leave the flag out"),
    "--trust-remote-code": (False, None, "octavo never runs code out of a model: leave the flag out"),
    "--enforce-eager": (False, None, "octavo has no compiled graphs to turn off: leave the flag out"),
    "--device": (True, "cpu", "octavo runs on the CPU: leave the flag out"),
}


def refuse_flags(function: F) -> F:
    """Decorator of a command: adds the hidden flags. They never reach the command."""
    for name, (takes_value, *_) in REFUSED.items():
        function = click.option(
            name, is_flag=not takes_value, default=None, hidden=True, expose_value=False, callback=_refuse
        )(function)
    return function


def _refuse(_: click.Context, parameter: click.Parameter, value: object) -> None:
    name = parameter.opts[0]
    harmless, cure = REFUSED[name][1:]
    if value is None or (harmless is not None and value == harmless):
        return
    shown = name if value is True else f"{name} {value}"
    raise ConfigError(f"{shown} cannot be had; {cure}")
