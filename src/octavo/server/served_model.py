"""What the server says about the model it serves, and needs to read requests. It holds no weights and no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.engine.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names`: what clients may call it; the first is the one in answers.

    `max_model_len` bounds prompt + output of a request; `max_request_tokens` is that or less, where the pool of blocks
    cannot hold so much. `default_sampling` is the model's own advice (from its generation_config.json), for fields
    that a request leaves out. `vocab_size` is the number of token ids. `degraded`: what was asked for and is not had.
    `chat_error` is what is wrong with the model's own template, where it cannot be used.
    """

    names: tuple[str, ...]
    max_model_len: int
    max_request_tokens: int
    vocab_size: int
    chat_template: ChatTemplate | None = None
    chat_error: str | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    created: int = 0
    digest: str = ""
    kv_cache_dtype: str = ""
    weights_dtype: str = ""
    enable_prefix_caching: bool = True
    degraded: tuple[str, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)  # planned and allocated bytes
    kv_setting: Mapping[str, object] = field(default_factory=dict)  # scales of the KV cache, and its certificate
    peak_resident_bytes: Callable[[], int] | None = None

    @property
    def name(self) -> str:
        return self.names[0]
