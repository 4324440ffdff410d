"""An executor that computes nothing and believes nothing: it proves that a plan reads only what was written.

Instead of K and V each slot keeps the position, the token and a hash of all tokens up to it, which is what real K and V
depend on. Reading checks every slot; sampling is a function of the prefix alone. It knows requests only by the prompts
that a test tells it, and never looks into the core. What attention would choose is left to `ChosenSlots`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.radix_node import GONE
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockCopy, BlockTable, Row, SampledToken, SampleSpec, StepPlan, StepResult, TokenLogprob
from octavo.testing.chosen_slots import Chosen, ChosenSlots, Slot
from octavo.testing.text_hash import extend_hash, hash_of

_MASK = 2**64 - 1


def sample_token(prefix: int, spec: SampleSpec, vocab_size: int) -> int:
    """The token that follows a text: any function of the text, the seed and the position that obeys the ban will do."""
    token = extend_hash(prefix, spec.seed % _MASK) % vocab_size
    while token in spec.banned_token_ids:
        token = (token + 1) % vocab_size
    return token


def candidates_of(prefix: int, spec: SampleSpec, vocab_size: int) -> list[TokenLogprob]:
    """All tokens that may follow a text, most likely first: a function of the text alone."""
    allowed = [token for token in range(vocab_size) if token not in spec.banned_token_ids]
    weights = {token: extend_hash(prefix, token) % 4096 / 512 for token in allowed}
    total = math.log(sum(math.exp(-weight) for weight in weights.values()))
    ordered = sorted(allowed, key=lambda token: (weights[token], token))
    return [TokenLogprob(token, -weights[token] - total) for token in ordered]


def score_of(prefix: int, token: int, vocab_size: int) -> float:
    """The log-probability of a token after a text."""
    spec = SampleSpec(SamplingParams(), 0, 0)
    return next(one.logprob for one in candidates_of(prefix, spec, vocab_size) if one.token_id == token)


def reference_text(prompt: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int) -> list[int]:
    """The output tokens that an engine without cache, batch or limits gives, one for each spec."""
    prefix = hash_of(prompt)
    output = []
    for spec in specs:
        output.append(sample_token(prefix, spec, vocab_size))
        prefix = extend_hash(prefix, output[-1])
    return output


class CheckingExecutor:
    """Implements Executor. An AssertionError names the request, the position and what is wrong.

    `windows`: of each KV group, the tokens that a row reads, itself included; None: all; 0: those of its own block.
    """

    def __init__(
        self,
        block_size: int,
        *,
        vocab_size: int = 3,
        windows: Sequence[int | None] = (None,),
        keep_plans: bool = True,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._windows = tuple(windows)
        self._keep_plans = keep_plans
        self._slots: dict[int, list[Slot | Chosen | None]] = {}  # block id -> its slots
        self._chosen = ChosenSlots(block_size, self._block)
        self._texts: dict[str, list[int]] = {}  # request id -> the tokens that it must have
        self._told: set[str] = set()
        self.fail_next: dict[str, str] = {}  # request id -> why its next row fails
        self.plans: list[StepPlan] = []
        self.num_processed_tokens = 0
        self.num_copies = 0

    def expect(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tell a request's prompt, so that reading another's text is noticed even where that text is whole."""
        self._texts[request_id] = list(token_ids)

    def forget(self, request_id: str) -> None:
        """What its text will be is not known."""
        self._texts.pop(request_id, None)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._keep_plans:
            self.plans.append(plan)
        assert not plan.coasting.num_rows, "rows that are not written out cannot be checked"
        done = 0
        for compaction in plan.compactions:
            for copy in plan.copies[done : compaction.num_copies_before]:
                self._copy(copy)
            self._chosen.compact(compaction)
            done = compaction.num_copies_before
        for copy in plan.copies[done:]:
            self._copy(copy)
        ids = [row.request_id for row in plan.rows]
        assert len(set(ids)) == len(ids), "a request has two rows in one step"
        assert not set(ids) & set(plan.preempted), "a preempted request has a row"
        self._check_writes(plan.rows)
        result = StepResult({}, num_tokens=sum(len(row.token_ids) for row in plan.rows))
        prefixes = [self._read(row) for row in plan.rows]  # all read before any writes: rows must not depend on order
        for row, prefix in zip(plan.rows, prefixes, strict=True):
            last = self._write(row, prefix)
            if row.request_id in self.fail_next:
                result.failed[row.request_id] = self.fail_next.pop(row.request_id)
                continue
            self._score_prompt(row, prefix, result)
            if row.weighing is not None:
                result.weighed[row.request_id] = self._chosen.weigh(row, row.weighing, prefix)
            specs = [] if row.sample is None else [(row.request_id, row.sample)]
            specs += [(branch.request_id, branch.sample) for branch in row.branch_samples]
            for name, spec in specs:
                self._sample(name, row, last, spec, result)
        self.num_processed_tokens += result.num_tokens
        return result

    def _sample(self, name: str, row: Row, prefix: int, spec: SampleSpec, result: StepResult) -> None:
        """`name` is the row's own request, or a branch whose text ends with the row."""
        assert name not in result.sampled, f"{name} draws twice in one step"
        if name in self._texts:
            self._check_sample(name, row, spec)
        if spec.num_candidates:
            found = candidates_of(prefix, spec, self._vocab_size)
            result.candidates[name] = tuple(found[: spec.num_candidates])
            return
        token = sample_token(prefix, spec, self._vocab_size)
        logprob = score_of(prefix, token, self._vocab_size) if spec.params.logprobs is not None else None
        result.sampled[name] = SampledToken(token, logprob)
        if name in self._texts:
            self._texts[name].append(token)

    def _score_prompt(self, row: Row, prefix: int, result: StepResult) -> None:
        scores = row.prompt_scores
        if scores is None:
            return
        assert scores.targets, f"{row.request_id}: scores of nothing"
        assert scores.first + len(scores.targets) <= len(row.token_ids), f"{row.request_id}: scores beyond its row"
        text, found = self._texts.get(row.request_id), []
        for index, token in enumerate(row.token_ids):
            prefix = extend_hash(prefix, token)
            if scores.first <= index < scores.first + len(scores.targets):
                target = scores.targets[index - scores.first]
                place = row.start + index + 1
                assert text is None or text[place] == target, f"{row.request_id}: a foreign target at {place}"
                found.append(SampledToken(target, score_of(prefix, target, self._vocab_size)))
        result.prompt_scores[row.request_id] = tuple(found)

    def _block(self, block_id: int) -> list[Slot | Chosen | None]:
        assert block_id >= 0, f"block {block_id} does not exist"
        return self._slots.setdefault(block_id, [None] * self._block_size)

    def _copy(self, copy: BlockCopy) -> None:
        assert copy.source != copy.target, f"block {copy.source} is copied to itself"
        assert 0 < copy.num_tokens < self._block_size, (
            f"a copy of {copy.num_tokens} tokens: blocks have {self._block_size}"
        )
        source, target = self._block(copy.source), self._block(copy.target)
        for index in range(self._block_size):
            assert index >= copy.num_tokens or source[index] is not None, f"block {copy.source} is copied with a hole"
            target[index] = source[index] if index < copy.num_tokens else None
        self.num_copies += 1

    def _check_writes(self, rows: Sequence[Row]) -> None:
        """No slot is written twice, and no block is written that another row reads."""
        writer: dict[int, str] = {}
        for row in rows:
            assert row.token_ids, f"{row.request_id}: a row must run at least one token"
            assert len(row.block_tables) == len(self._windows), (
                f"{row.request_id}: {len(row.block_tables)} block tables"
            )
            begin = row.start - row.dropped[1]
            for table in row.block_tables:
                first, last = begin // self._block_size, (begin + len(row.token_ids) - 1) // self._block_size
                assert last < len(table), (
                    f"{row.request_id}: position {row.start + len(row.token_ids) - 1} has no block"
                )
                for block_id in table[first : last + 1]:
                    other = writer.setdefault(block_id, row.request_id)
                    assert other == row.request_id, f"{row.request_id} and {other} both write block {block_id}"
        for row in rows:
            held = [block_id for table in row.block_tables for block_id in table if block_id != GONE]
            assert len(set(held)) == len(held), f"{row.request_id}: a block stands twice in its tables"
            for block_id in held:
                other = writer.get(block_id, row.request_id)
                assert other == row.request_id, f"{other} writes block {block_id} that {row.request_id} holds"

    def _read(self, row: Row) -> int:
        """What attention reads before this row's own tokens: returns the hash of that prefix.

        With a window it is less; what stands there tells of the whole text all the same, as K and V do.
        """
        ends: set[int | None] = set()
        for table, window in zip(row.block_tables, self._windows, strict=True):
            if row.dropped[0] < 0:
                assert window is None, f"{row.request_id}: what a window reads is not chosen by attention"
                ends.add(self._chosen.read(row, table, self._texts.get(row.request_id)))
            else:
                ends.add(self._read_group(row, table, window))
        ends.discard(None)  # of a window of one token, which reads nothing of others
        assert len(ends) <= 1, f"{row.request_id}: the groups differ before position {row.start}"
        if ends:
            return ends.pop() or 0
        return hash_of(self._texts[row.request_id][: row.start])

    def _read_group(self, row: Row, table: BlockTable, window: int | None) -> int | None:
        """The hash of the text before the row, as one KV group tells it; None if it reads nothing of it."""
        text, (gap, count) = self._texts.get(row.request_id), row.dropped
        first = 0 if window is None else max(0, row.start - window + 1)
        if window == 0:
            first = row.start - row.start % self._block_size
        prefix = 0 if not first else None
        for position in range(first, row.start):
            if gap <= position < gap + count:  # what was dropped is not read, and the chain of hashes breaks off
                prefix = None
                continue
            index, offset = divmod(position if position < gap else position - count, self._block_size)
            assert table[index] != GONE, f"{row.request_id}: position {position} is read, and its block was given up"
            slot = self._block(table[index])[offset]
            assert slot is not None, f"{row.request_id}: nothing was written at position {position}"
            assert isinstance(slot, Slot), f"{row.request_id}: at position {position} stands what another chose"
            assert slot.position == position, f"{row.request_id}: position {slot.position} stands at {position}"
            assert not slot.num_dropped or position >= gap, f"{row.request_id}: position {position} has not seen all"
            assert not slot.num_dropped or count, f"{row.request_id}: position {position} has not seen all before it"
            if text is not None:
                assert slot.token == text[position], f"{row.request_id}: a foreign token stands at position {position}"
                if prefix is None:
                    prefix = hash_of(text[:position])
            expected = slot.prefix if prefix is None else extend_hash(prefix, slot.token)
            assert slot.prefix == expected, f"{row.request_id}: what stands at {position} belongs to another text"
            prefix = expected
        return prefix

    def _write(self, row: Row, prefix: int) -> int:
        """Write the row's tokens; returns the hash of the text up to its last one."""
        text = self._texts.get(row.request_id)
        for position, token in enumerate(row.token_ids, row.start):
            if text is not None:
                assert position < len(text), f"{row.request_id}: runs position {position} of a text of {len(text)}"
                assert token == text[position], f"{row.request_id}: runs a foreign token at position {position}"
            prefix = extend_hash(prefix, token)
            index, offset = divmod(position - row.dropped[1], self._block_size)
            for table in row.block_tables:
                self._block(table[index])[offset] = Slot(position, token, prefix, row.dropped[1])
        return prefix

    def _check_sample(self, name: str, row: Row, spec: SampleSpec) -> None:
        end, text = row.start + len(row.token_ids), self._texts[name]
        assert end == len(text), f"{name}: samples after {end} of {len(text)} tokens"
        if name != row.request_id and row.request_id in self._texts:
            # The row's own text may have grown in this step already: it draws first.
            assert self._texts[row.request_id][:end] == text, f"{name} draws from the text of {row.request_id}"
        if spec.prompt_token_ids:
            history = [*spec.prompt_token_ids, *spec.output_token_ids]
            assert history == text, f"{name}: the penalties see another text"
            assert len(spec.output_token_ids) == spec.position, f"{name}: position {spec.position} is wrong"
