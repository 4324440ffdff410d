"""What the asynchronous engine can be told. It does not know the model, the cache or HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

MAX_STREAM_INTERVAL_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_waiting` bounds the queue: a request that arrives while so many wait is refused, not kept.

    With more than four open requests, text goes out every `stream_interval_ms` milliseconds at most (with more than
    eight, in proportion less often), but for first tokens and ends (outbox.py); 0 sends every token by itself.
    `eos_token_ids` None means the tokenizer's own. Texts of
    `inline_characters` or fewer are tokenised on the event loop, longer ones on a thread beside it.
    """

    max_waiting: int = 1024
    stream_interval_ms: float = 20.0
    eos_token_ids: tuple[int, ...] | None = None
    inline_characters: int = 2000

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(
                f"max_waiting is {self.max_waiting}; it must be at least 1: the longest queue of requests"
            )
        if not 0 <= self.stream_interval_ms <= MAX_STREAM_INTERVAL_MS:
            raise ConfigError(
                f"stream_interval_ms is {self.stream_interval_ms}; it must be between 0 (every token by itself) and "
                f"{MAX_STREAM_INTERVAL_MS:g} milliseconds"
            )
        if self.inline_characters < 0:
            raise ConfigError(f"inline_characters is {self.inline_characters}; it must be at least 0")
