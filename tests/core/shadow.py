"""What the outside knows of a request, and what an engine without a cache, a batch or a limit would answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.beam_search import BeamRules, BeamSearch, Hypothesis
from octavo.core.keep_policy import KeepPolicy
from octavo.core.request_output import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampleSpec
from octavo.testing.checking_executor import candidates_of, extend_hash, hash_of, sample_token

VOCAB_SIZE = 3


@dataclass
class Shadow:
    """What the outside knows of one request."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    eos: tuple[int, ...]
    namespace: str
    is_branch: bool = False
    inherited: list[int] = field(default_factory=list)  # output tokens that a branch starts with
    output: list[int] = field(default_factory=list)
    final: RequestOutput | None = None
    preemptions: int = 0
    num_run: int = 0  # tokens of its rows
    group: str | None = None  # the request that it is a branch of, where that has several
    branch: int = 0
    width: int = 1
    was_touched: bool = False  # a branch of its request was ended from outside
    finals: list[RequestOutput] = field(default_factory=list)  # of a beam search
    keep: KeepPolicy | None = None
    num_weighed: int | None = None  # positions whose queries are counted; None: none yet
    chosen_at: set[int] = field(default_factory=set)  # computed tokens at which it was chosen what stays

    def reference_beams(self, vocab_size: int) -> list[Hypothesis]:
        """What a search gives that has no cache, no batch and no limits."""
        ending = frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else set(self.eos))
        search = BeamSearch(
            BeamRules(
                self.width, self.params.max_tokens, ending, self.params.length_penalty, self.params.early_stopping
            )
        )
        beams = [list(self.prompt)]
        while not search.is_over:
            banned = tuple(sorted(ending)) if len(beams[0]) - len(self.prompt) < self.params.min_tokens else ()
            spec = SampleSpec(self.params, 0, 0, banned)
            found = [candidates_of(hash_of(beam), spec, vocab_size)[: search.rules.num_candidates] for beam in beams]
            beams = [[*beams[one.parent], one.token_id] for one in search.advance(found)]
        return search.best(self.params.n)

    def reference(self, vocab_size: int = VOCAB_SIZE) -> tuple[list[int], str]:
        """Output and finish reason that an engine without a cache, a batch or a limit gives."""
        params, output, prefix = self.params, list(self.inherited), 0
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos))
        for token in (*self.prompt, *output):
            prefix = extend_hash(prefix, token)
        while True:
            banned = tuple(sorted(ending)) if len(output) < params.min_tokens else ()
            token = sample_token(prefix, SampleSpec(params, self.seed, len(output), banned), vocab_size)
            output.append(token)
            prefix = extend_hash(prefix, token)
            if token in ending and len(output) > params.min_tokens:
                return output, "stop"
            if len(output) >= params.max_tokens:
                return output, "length"
