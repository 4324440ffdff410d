"""What the asynchronous engine can be told. It does not know the model, the cache or HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_waiting` bounds the queue: a request that arrives while so many wait is refused, not kept.

    `eos_token_ids` None means the tokenizer's own. Texts of `inline_characters` or fewer are tokenised on the event
    loop, longer ones on a thread beside it.
    """

    max_waiting: int = 1024
    eos_token_ids: tuple[int, ...] | None = None
    inline_characters: int = 2000

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(
                f"max_waiting is {self.max_waiting}; it must be at least 1: the longest queue of requests"
            )
        if self.inline_characters < 0:
            raise ConfigError(f"inline_characters is {self.inline_characters}; it must be at least 0")
