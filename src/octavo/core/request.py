"""One request and where it stands. It does not know who else runs, nor what a block holds.

There are no phases: `num_computed_tokens` catches up with the known tokens (prompt and output so far), whether these
are a prompt, the last sampled token, or what has to be computed again after a preemption.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import PromptScores, SampleSpec
from octavo.errors import InvalidRequestError

if TYPE_CHECKING:
    from octavo.core.branches import Branches
    from octavo.core.keep_policy import Drops, KeepPolicy
    from octavo.core.kept import Kept
    from octavo.core.radix_node import Node

PRIORITY_STEP = 1024  # arrivals that one level of priority is worth: what keeps the less urgent from starving
MAX_TOKEN_ID = 2**32 - 1


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    JOINING = "joining"  # a branch that takes a seat, and will share what another branch computes now
    FINISHED = "finished"


class Request:
    """Mutable, owned by the scheduler that it was added to; its block fields are the block manager's to change.

    A request with several branches is one of these for each branch, with an id of its own, and a `group` of them.

    Lower `priority` is more urgent. Requests are ordered by arrival, a level of priority counting as a head start of
    `PRIORITY_STEP` arrivals: strict first come, first served within a priority, and nobody is overtaken for ever.
    """

    __slots__ = (
        "arrival",
        "banned_token_ids",
        "block_tables",
        "branch",
        "coasts_from",
        "coasts_until",
        "drops",
        "finish_reason",
        "group",
        "is_counted",
        "keep",
        "kept",
        "namespace",
        "needs_token_history",
        "node",
        "num_accounted_tokens",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_dropped_tokens",
        "num_passed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_shared_blocks",
        "order",
        "params",
        "priority",
        "request_id",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...] = (),
        namespace: str = "",
        priority: int = 0,
        keep: KeepPolicy | None = None,
    ) -> None:
        """Raises InvalidRequestError for an empty prompt and for a token id that no model can have."""
        self.token_ids = _token_ids(prompt_token_ids)  # prompt, then output
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.namespace = namespace
        self.priority = priority  # lower is more urgent
        self.keep = keep  # which tokens stay in its blocks; None: all
        self.drops: Drops | None = None  # set by the scheduler, where not all are kept
        self.kept: Kept | None = None  # set by the scheduler, where attention says what is kept
        self.num_prompt_tokens = len(self.token_ids)
        ending = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
        self.stop_token_ids = frozenset(ending)
        self.banned_token_ids = tuple(sorted(self.stop_token_ids)) if params.min_tokens else ()
        self.needs_token_history = params.has_penalty
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.arrival = 0  # set by the scheduler
        self.order = (0, 0, 0)  # set by the scheduler: the smaller goes first
        self.num_computed_tokens = 0  # tokens whose K and V are in the request's blocks
        self.num_dropped_tokens = 0  # of these, gone again: later ones stand so many slots further ahead
        self.num_cached_tokens = 0  # prompt tokens that came from the cache instead of being computed
        # Invariant: positions below it have been counted once, as hit or as computed; what runs again is recomputed.
        self.num_accounted_tokens = 0
        self.is_counted = False  # its prompt stands in the ledger: it has run before
        self.num_preemptions = 0
        self.num_scored_tokens = 0  # positions of the prompt after which the likelihood of the next token was told
        self.coasts_from = self.coasts_until = 0  # see `Coasting`, whose they are to change; 0: it does not coast
        self.group: Branches | None = None  # None: the only branch
        self.branch = 0  # which of its request; a beam's number only tells it from those that run beside it
        self.block_tables: list[array[int]] = []  # one table of block ids per KV group, all of the same length
        # Invariant: the first num_passed_blocks[g] entries of table g are GONE, and no others; 0 without a window.
        self.num_passed_blocks: list[int] = []
        self.num_shared_blocks = 0  # token blocks from the start that others had as well: where their texts parted
        # Invariant: the first num_committed_blocks of each table are the blocks of the nodes from the root to `node`.
        self.num_committed_blocks = 0
        self.node: Node | None = None  # node of the last committed block; None stands for the root of the namespace

    @property
    def num_held_blocks(self) -> int:
        """Blocks that it holds, of all KV groups; what branches share counts for each."""
        return sum(map(len, self.block_tables)) - sum(self.num_passed_blocks)

    def held_blocks(self, group: int) -> array[int]:
        """The blocks of one KV group that it holds, in the order of its text."""
        first = self.num_passed_blocks[group]
        return self.block_tables[group][first:] if first else self.block_tables[group]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def has_unscored_tokens(self) -> bool:
        """Whether the likelihood of tokens of its prompt was asked for, and is not known yet."""
        if self.params.prompt_logprobs is None or self.branch:
            return False
        return self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def max_hit_tokens(self) -> int:
        """As many tokens may come from the cache; the logits of those that follow are wanted."""
        most = self.num_scored_tokens if self.has_unscored_tokens else len(self.token_ids) - 1
        if self.drops is None:
            return most
        return min(most, self.drops.num_shared, most if self.kept is None else self.kept.max_hit_tokens)

    @property
    def num_sharable_tokens(self) -> int:
        """As many of its known tokens others may find in its blocks: those that have seen all before them."""
        if self.drops is None:
            return len(self.token_ids)
        if self.kept is not None and self.num_dropped_tokens:
            return 0
        return min(len(self.token_ids), self.drops.num_shared)

    def num_slots(self, num_tokens: int) -> int:
        """The most slots that are filled on its way to so many tokens, from those that are computed."""
        return num_tokens if self.drops is None else self.drops.most_slots(self.num_computed_tokens, num_tokens)

    def new_branch(self, branch: int, seed: int) -> Request:
        """Another branch of the same request, with the tokens that this one has now."""
        assert self.group is not None
        name = f"{self.group.request_id}#{branch}" if branch else self.group.request_id
        made = Request(name, self.token_ids, self.params, seed=seed, namespace=self.namespace, priority=self.priority)
        made.num_prompt_tokens, made.num_scored_tokens = self.num_prompt_tokens, self.num_scored_tokens
        made.stop_token_ids, made.banned_token_ids = self.stop_token_ids, self.banned_token_ids
        made.arrival, made.order = self.arrival, (*self.order[:2], branch)
        made.group, made.branch = self.group, branch
        return made

    def sample_spec(self) -> SampleSpec:
        """What the sampler needs for the next token of this request."""
        position = len(self.token_ids) - self.num_prompt_tokens
        banned = self.banned_token_ids if position < self.params.min_tokens else ()
        group = self.group
        if group is None and not self.needs_token_history:
            return SampleSpec(self.params, self.seed, position, banned)
        num_candidates = 0 if group is None else group.num_candidates
        if not self.needs_token_history:
            return SampleSpec(self.params, self.seed, position, banned, (), (), num_candidates)
        # Slices of an array are copies, and cheap ones: these are made in every step.
        prompt, output = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        return SampleSpec(self.params, self.seed, position, banned, prompt, output, num_candidates)

    def prompt_scores(self, start: int, end: int) -> PromptScores | None:
        """What a row of positions [start, end) has to tell about the prompt."""
        if not self.has_unscored_tokens:
            return None
        first = self.num_scored_tokens
        targets = tuple(self.token_ids[first + 1 : min(end + 1, self.num_prompt_tokens)])
        assert start <= first, f"{self.request_id}: positions {first} to {start} were never scored"
        if first >= end:  # computed again after a preemption
            return None
        return PromptScores(first - start, targets, self.params.prompt_logprobs or 0)

    def take_token(self, token_id: int, max_model_len: int) -> str | None:
        """Append a sampled token. Returns the finish reason if it was the last one."""
        position = self.num_output_tokens
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and position >= self.params.min_tokens:
            self.stop_reason = token_id
            return "stop"
        if position + 1 >= self.params.max_tokens or len(self.token_ids) >= max_model_len:
            return "length"
        return None


def _token_ids(prompt: Sequence[int]) -> array[int]:
    if not len(prompt):
        raise InvalidRequestError("the prompt has 0 tokens; it must have at least 1", param="prompt")
    try:
        return array("I", prompt)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(
            f"the prompt holds something that is no token id ({error}); ids are integers from 0 to {MAX_TOKEN_ID}",
            param="prompt",
        ) from error
