"""Runs settings beside the reference, step by step, on every path, and measures how far their answers are apart.

All engines of a path get the same requests and have as many blocks, so they make the same plans: in each step the same
rows come out of all of them, and no more logits are in memory than those of two of them. It does not know which limits
are good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.certify.divergence import Distance, Expected, Tally
from octavo.certify.paths import COMPARED_PIECES, PIECE_TOKENS, Path, Text
from octavo.certify.probe import Heard, Probe
from octavo.certify.setting import Setting
from octavo.kernels.ops import Ops
from octavo.models.family import CausalLM

OnPath = Callable[[Path], None]  # called before each path


@dataclass(frozen=True, slots=True)
class PathResult:
    """One setting on one path."""

    distance: Distance
    num_cached_tokens: int  # that came from the cache: of the path prefix_hit
    is_same: bool  # bitwise the logits of the cold path, wherever both have some


class _Runner:
    """One setting, on all paths."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.results: dict[str, PathResult] = {}
        self.digests: dict[tuple[str, int], bytes] = {}  # of the rows of the cold path
        self.tally = Tally()
        self.is_same = True
        self.probe: Probe | None = None

    def compare(self, heard: Heard, path_name: str) -> None:
        """Law 1: what a row gives depends on nothing but the text before it."""
        if heard.request_id not in _COMPARED or heard.first >= PIECE_TOKENS:
            return
        for index, row in enumerate(heard.logits[: PIECE_TOKENS - heard.first]):
            key, digest = (heard.request_id, heard.first + index), blake2b(row.tobytes(), digest_size=16).digest()
            if path_name == "cold":
                self.digests[key] = digest
            elif key in self.digests:
                self.is_same = self.is_same and self.digests[key] == digest


_COMPARED = frozenset(f"piece {index}" for index in range(COMPARED_PIECES))


def measure(
    model: CausalLM, ops: Ops, settings: Sequence[Setting], paths: Sequence[Path], on_path: OnPath = lambda _: None
) -> list[Mapping[str, PathResult]]:
    """Of each setting its result on each path, by name. The first setting is the reference; the first path is cold."""
    runners = [_Runner(setting) for setting in settings]
    for path in paths:
        on_path(path)
        for runner in runners:
            runner.tally, runner.is_same = Tally(), True
            runner.probe = Probe(model, ops, runner.setting.spec, path.config, runner.setting.scales)
        for texts in path.rounds:
            _run_round(runners, path.name, texts)
        for runner in runners:
            assert runner.probe is not None
            cached = sum(runner.probe.cached_tokens.values())
            runner.results[path.name] = PathResult(runner.tally.distance(), cached, runner.is_same)
            runner.probe = None
    return [runner.results for runner in runners]


def _run_round(runners: Sequence[_Runner], path_name: str, texts: Sequence[Text]) -> None:
    probes = []
    for runner in runners:
        assert runner.probe is not None
        probes.append(runner.probe)
        for text in texts:
            runner.probe.add(text.name, text.token_ids, text.first_heard)
    ids = {text.name: text.token_ids for text in texts}
    while probes[0].has_work:
        expected: list[tuple[Heard, Expected]] = []
        for runner, probe in zip(runners, probes, strict=True):
            heard = probe.step()
            for part in heard:
                runner.compare(part, path_name)
            if not expected:
                expected = [(part, Expected.of(part.logits.copy())) for part in heard]
            for part, (other, wanted) in zip(heard, expected, strict=True):
                assert (part.request_id, part.first, len(part.logits)) == _place(other), "engines plan alike"
                after = ids[part.request_id][part.first + 1 : part.first + 1 + len(part.logits)]
                runner.tally.add(part.logits, wanted, after)


def _place(heard: Heard) -> tuple[str, int, int]:
    return heard.request_id, heard.first, len(heard.logits)
