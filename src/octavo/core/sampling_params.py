"""What a request asks of sampling. Data only: it does not know how a token is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.keep_policy import parse_policy
from octavo.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_BRANCHES = 128
MAX_LENGTH_PENALTY = 5.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    `temperature` 0 is greedy. `top_k` 0 (or -1) and `top_p` 1 mean "all tokens". `logprobs` is None for none, or the
    number of most likely tokens to report beside the chosen one (0 to 20). `seed` None lets the engine choose one;
    with a seed, token i of a request is a function of (seed, i) and the logits alone.

    `n` answers are returned. `best_of` branches run (None: n), each with a seed of its own (`core.seeds.branch_seed`);
    if they are more than n, the n with the highest sum of raw log-probabilities are the answers. With
    `use_beam_search`, `best_of` is the width of the search. `prompt_logprobs` is what `logprobs` is, for the tokens of
    the prompt; then nothing of the prompt comes from the cache. `kv_policy` says which tokens of the text are kept, as
    `keep_policy.parse_policy` reads it; None: what is said for all requests.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0  # beam search: a score is the sum of log-probabilities / length ** length_penalty
    early_stopping: bool | str = False  # beam search: True, False or "never" (see core/beam_search.py)
    prompt_logprobs: int | None = None
    kv_policy: str | None = None

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, -1, None)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", param="top_p")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and at most 100 (1 is neutral)",
                param="repetition_penalty",
            )
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", token_id, 0, None)
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed, none of them empty",
                param="stop",
            )
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_range("n", self.n, 1, MAX_BRANCHES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_BRANCHES)
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping is {self.early_stopping!r}; it must be true, false or "never"', param="early_stopping"
            )
        self._check_beams()
        if self.kv_policy is not None:
            try:
                parse_policy(self.kv_policy)
            except ValueError as error:
                raise InvalidRequestError(str(error), param="kv_policy") from error

    @property
    def has_penalty(self) -> bool:
        """Whether what was generated, or the prompt, changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_branches(self) -> int:
        """How many texts are worked on at once: the width, for beam search."""
        return self.n if self.best_of is None else self.best_of

    @property
    def answers_at_end(self) -> bool:
        """Whether no part of an answer is known before the end of all branches."""
        return self.use_beam_search or self.num_branches > self.n

    def _check_beams(self) -> None:
        """What beam search cannot have, and what only beam search can have."""
        neutral = _NEUTRAL_IN_BEAM_SEARCH if self.use_beam_search else _NEUTRAL_WITHOUT_BEAM_SEARCH
        for name, accepted in neutral.items():
            value = getattr(self, name)
            if value not in accepted:
                allowed = " or ".join(repr(one) for one in accepted)
                why = "cannot be had with" if self.use_beam_search else "is for"
                raise InvalidRequestError(
                    f"{name} is {value!r}, which {why} beam search; {name} must be {allowed}", param=name
                )


# What contradicts a search for the most likely text, or it does not tell: field -> the values that ask for nothing.
_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "stop": ((),),
    "logprobs": (None,),
}
_NEUTRAL_WITHOUT_BEAM_SEARCH: dict[str, tuple[object, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if math.isnan(value) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise InvalidRequestError(f"{name} is {value}; it must be at least {low}{upper}", param=name)
