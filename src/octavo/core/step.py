"""The contract between deciding and doing: what to run, and what came of it. Plain data, no behaviour."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from octavo.core.sampling_params import SamplingParams
from octavo.core.selection import Choice

BlockTable: TypeAlias = "array[int]"  # array('i') of block ids; a snapshot, to be read only


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy slots [0, num_tokens) of one block to another, in every layer of its group, before any row of the step runs.

    Copies run in the order of the plan: a later one may overwrite the source of an earlier one.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """Move what a request keeps of its slots, for each layer and KV head others, to the front of blocks of its own.

    All is read before anything is written: targets may be among the sources. It runs after `num_copies_before` copies
    of the plan, before its other copies, and before any row; compactions run in the order of the plan.
    """

    sources: tuple[BlockTable, ...]  # one table per KV group
    targets: tuple[BlockTable, ...]
    num_slots: int  # that are filled in the sources
    num_kept: int
    keep_list: bytes  # as the executor gave it (`Weighed`)
    num_copies_before: int = 0


@dataclass(frozen=True, slots=True)
class Weighing:
    """Count the attention of a row's tokens from index `first` on; with `choice`, choose after the row what is kept."""

    first: int
    mass: bytes  # what the executor gave for the tokens before (`Weighed`); empty: these are the first
    choice: Choice | None


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """All that is needed to draw one token from a row of logits, whatever else is in the batch."""

    params: SamplingParams
    seed: int  # the request's, or the one that the engine chose
    position: int  # index of the token to draw, counted from the first output token
    banned_token_ids: tuple[int, ...] = ()  # stop tokens, while fewer than min_tokens are drawn
    prompt_token_ids: Sequence[int] = ()  # filled only where a penalty reads them: a snapshot
    output_token_ids: Sequence[int] = ()  # filled only where a penalty reads them: a snapshot
    num_candidates: int = 0  # above 0: draw nothing, give that many of the most likely tokens


@dataclass(frozen=True, slots=True)
class BranchSample:
    """Another branch of the request whose text ends where the row ends: it draws from the same logits."""

    request_id: str
    sample: SampleSpec


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely tokens of the prompt are: target i after the tokens of the row up to index first + i."""

    first: int
    targets: tuple[int, ...]
    num_top: int  # most likely tokens to tell beside each


@dataclass(frozen=True, slots=True)
class Row:
    """Run the tokens at positions [start, start + len(token_ids)) of one request.

    Their K and V are written to the slots that `block_tables` (one table per KV group) gives for these positions;
    attention of the row at position p reads positions [0, p], in a group with a window of w tokens [p - w + 1, p]; what
    no row reads may be -1 in the table. With `sample`, the logits of the last token are drawn from, and once more for
    each of `branch_samples`.

    `dropped` (first, count): positions [first, first + count) are not kept; those behind them stand `count` slots
    further ahead, as if the text had never had them, but are rotated by their place in the whole text. With first -1 it
    is `count` positions that were chosen by attention, others for each layer and KV head (`Compaction`).
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_tables: tuple[BlockTable, ...]
    sample: SampleSpec | None
    branch_samples: tuple[BranchSample, ...] = ()
    prompt_scores: PromptScores | None = None
    dropped: tuple[int, int] = (0, 0)
    weighing: Weighing | None = None


@dataclass(frozen=True, slots=True)
class CoastingRows:
    """Further rows of one token each, of requests about which there is nothing else to say (see `core.coasting`).

    Only planned where the executor computes nothing and nobody hears the tokens.
    """

    num_rows: int = 0  # each draws a token
    read_tokens: int = 0  # over all of them: tokens known so far, the row's own included


NO_COASTING_ROWS = CoastingRows()


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_index: int
    copies: tuple[BlockCopy, ...]
    rows: tuple[Row, ...]
    preempted: tuple[str, ...] = ()
    coasting: CoastingRows = NO_COASTING_ROWS
    compactions: tuple[Compaction, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows) + self.coasting.num_rows

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not self.rows and not self.coasting.num_rows


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = (
        None  # natural logarithm, of the raw logits (temperature 1, no penalties); None: not asked for
    )
    top_logprobs: tuple[TokenLogprob, ...] = ()  # most likely first


@dataclass(frozen=True, slots=True)
class Weighed:
    """What came of a row's `Weighing`, in the executor's own form; the core only keeps it and gives it back."""

    mass: bytes  # attention that each slot got so far; after a choice, of the slots that are kept
    keep_list: bytes | None = None  # what was chosen, where that was asked for


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: dict[str, SampledToken]  # request_id -> the next token, for each sample of a row that did not fail
    failed: dict[str, str] = field(default_factory=dict)  # request_id -> why; the other rows are not touched by it
    num_tokens: int = 0  # rows that the kernels really processed: the ledger's truth
    # request_id -> log-probabilities after bias, penalties and bans, highest first, lowest id first among equals.
    candidates: dict[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_scores: dict[str, tuple[SampledToken, ...]] = field(default_factory=dict)  # request_id -> one per target
    weighed: dict[str, Weighed] = field(default_factory=dict)  # request_id -> for each row with a weighing


class Executor(Protocol):
    """Does what a plan says. It keeps no memory of requests between steps."""

    def execute(self, plan: StepPlan) -> StepResult: ...
