"""What the scheduler may be told. It does not know the size of the pool: that comes from the KV spec."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.core.keep_policy import parse_policy
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a request. All counts are in tokens but `max_num_seqs`."""

    max_num_seqs: int = 64  # requests running at once
    max_num_batched_tokens: int = 512  # tokens of one step: no request waits longer than that for its next token
    max_model_len: int = 2048  # prompt and output of one request
    enable_prefix_caching: bool = True
    enable_kv_cache: bool = True  # False: every token is computed from the whole text again
    kv_policy: str = "all"  # which tokens are kept of requests that do not say it: see `keep_policy.parse_policy`
    max_num_prefill_tokens: int | None = None  # of a step in which a prompt is alone; None: max_num_batched_tokens

    def __post_init__(self) -> None:
        try:
            parse_policy(self.kv_policy)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), because each running request gets a token in every step: raise it or lower "
                f"max_num_seqs"
            )
        if self.most_step_tokens < self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_prefill_tokens is {self.max_num_prefill_tokens}; it must be at least max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): raise it, lower that one, or leave it out"
            )
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it must be at least 2 (one prompt token, one new token)"
            )

    @property
    def most_step_tokens(self) -> int:
        """Of any step."""
        return self.max_num_batched_tokens if self.max_num_prefill_tokens is None else self.max_num_prefill_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The scheduler's config as a user gives it: `max_model_len` None means as long as model and memory allow."""

    max_num_seqs: int = 64  # requests that run at once
    max_num_batched_tokens: int = 512  # tokens of one step
    max_num_prefill_tokens: int | None = None  # of a step in which a prompt is alone; None: four times as many
    max_model_len: int | None = None  # tokens of prompt and output of one request
    enable_prefix_caching: bool = True
    enable_kv_cache: bool = True
    kv_policy: str = "all"  # which tokens of a text are kept: see `core.keep_policy`

    def __post_init__(self) -> None:
        self.config(2 if self.max_model_len is None else self.max_model_len)  # refuse now what can never be had

    def config(self, max_model_len: int, *, in_blocks: bool = True) -> SchedulerConfig:
        """in_blocks: see `models.family.Family`; larger steps of other families take memory that is not planned."""
        given: dict[str, Any] = {**asdict(self), "max_model_len": max_model_len}
        usual, alone = self.max_num_batched_tokens, self.max_num_prefill_tokens
        if alone is None:
            given["max_num_prefill_tokens"] = 4 * usual if in_blocks else usual
        elif alone > usual and not in_blocks:
            raise ConfigError(
                f"max_num_prefill_tokens is {alone}, but this model has no steps of more than max_num_batched_tokens "
                f"({usual}): leave it out, or raise that one"
            )
        return SchedulerConfig(**given)
