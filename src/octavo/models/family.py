"""What a family of models must be able to do: read its config, name its parts, make the model. One file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.models.config import ModelConfig
from octavo.models.config_gguf import Keys
from octavo.models.config_json import Fields
from octavo.models.packing import Packed
from octavo.models.parts import Parts


class CausalLM(Protocol):
    """What an executor needs of a model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weights_bytes(self) -> int: ...

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]: ...

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32: ...


@dataclass(frozen=True, slots=True)
class Family:
    """The functions of a family's file. Any: each takes the config that its own `from_json` and `from_gguf` make."""

    architectures: tuple[str, ...]  # as config.json names them
    model_types: Mapping[str, str]  # model_type of a config.json without architectures -> architecture
    gguf_names: Mapping[str, str]  # general.architecture -> architecture; empty: GGUF has no such files
    from_json: Callable[[str, Fields], Any]  # (architecture, fields) -> a ModelConfig
    parts: Callable[[Any, bool], Parts]  # (config, whether the file is a GGUF file)
    build: Callable[[Any, Packed, Ops], CausalLM]
    from_gguf: Callable[[Keys], Any] | None = None
    in_blocks: bool = False  # whether layers hold what lies between two matrices for blocks of a step's rows only
    prefix: str = ""  # of tensors' names, which some directories leave out
    # Why `forward` does not count attention (`step_rows.weigh`), which some policies choose tokens by; None: it does.
    why_uncounted: Callable[[Any], str | None] = lambda _: None
    # What K of each layer may be divided by, and q multiplied, for the sake of what rounds them: by the weights alone,
    # [num_kv_heads, head_dim]; none: nothing is known of it.
    key_scales: Callable[[Any], tuple[F32, ...]] = lambda _: ()
    # Between steps: has a little more of the memory of a step of so many rows ready; whether there was any to be had.
    prepare: Callable[[Any, int], bool] = lambda *_: False
