"""What branches save: counted against sets of blocks, and against what the core really holds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.replay.allocators import Lengths
from octavo.replay.fork_trees import ForkTree, fork_trees, read_trees, write_trees
from octavo.replay.lines import BadLines, read_lines
from octavo.replay.sharing_study import beam_blocks, study_beams, study_samples
from tests.replay.recorded_load import recorded_run

TREES = Path(__file__).parents[2] / "benchmarks" / "results" / "fork_trees.json"


def trees_of(width: int, steps: int) -> st.SearchStrategy[ForkTree]:
    step = st.lists(st.integers(0, width - 1), min_size=width, max_size=width).map(tuple)
    rest = st.lists(step, min_size=steps, max_size=steps)
    return rest.map(lambda more: ForkTree(((0,) * width, *more)))


@given(trees_of(3, 30), st.integers(1, 20), st.integers(0, 30), st.sampled_from([1, 4, 16]))
@settings(max_examples=150, deadline=None)
def test_blocks_of_beams_are_those_of_their_histories(tree: ForkTree, prompt: int, length: int, size: int) -> None:
    """Each block of a beam is named by the branch that ended it and by when; beams never share what is unfilled."""
    histories = [[(-1, beam)] for beam in range(3)]  # of each beam: who wrote its tokens
    lines: list[list[tuple[int, int]]] = [[], [], []]
    for step in range(length):
        parents = tree.parents_at(step)
        lines = [[*lines[parent], (step, beam)] for beam, parent in enumerate(parents)]
    names = set()
    for beam in range(3):
        text = [("prompt", at) for at in range(prompt)] + lines[beam]
        for start in range(0, len(text), size):
            block = text[start : start + size]
            is_last = start + size >= len(text)
            own = is_last and length > 0
            names.add((start, beam) if own else (start, block[-1]))
    assert histories
    assert beam_blocks(tree, prompt, length, size) == len(names)


def test_samples_share_the_full_blocks_of_the_prompt() -> None:
    saving = study_samples([Lengths(40, 1)], 3, 16)
    # 41 tokens: two blocks shared, a third one for each branch.
    assert saving.saved_share == pytest.approx(1 - (2 + 3) / 9)


def test_beams_that_never_part_save_all_but_the_last_block() -> None:
    tree = ForkTree(((0, 0), *[(0, 0)] * 20))
    assert beam_blocks(tree, 10, 22, 4) == 7 + 2


def test_beams_that_part_at_once_share_the_prompt() -> None:
    tree = ForkTree(((0, 0), *[(0, 1)] * 20))
    assert beam_blocks(tree, 8, 8, 4) == 2 + 2 * 2


def test_trees_of_a_recording(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run.jsonl")
    lines = read_lines(str(tmp_path / "run.jsonl"), BadLines())
    next(lines)
    trees = fork_trees(lines)
    assert len(trees) > 3
    assert {tree.width for tree in trees} == {2}
    assert all(tree.parents[0] == (0, 0) for tree in trees), "the first step has one beam, which all go on from"
    assert any(len(set(step)) == 1 for tree in trees for step in tree.parents[1:]), "some beams are dropped"


def load_of(prompt: float, output: float) -> list[Lengths]:
    chance = random.Random(0)
    return [
        Lengths(max(1, round(chance.expovariate(1 / prompt))), max(1, round(chance.expovariate(1 / output))))
        for _ in range(600)
    ]


def test_the_findings_of_the_paper() -> None:
    """Kwon et al. 2023, section 6.3, Alpaca: beams save 37.6% to 55.2%, samples 6.1% to 9.8% from 2 to 6 branches. Fork
    trees of SmolLM2, and exponential lengths of Alpaca's means; six beams of a small model part later.
    """
    load = load_of(19.31, 58.45)
    trees = read_trees(TREES)
    shares = [study_beams(load, [t for t in trees if t.width == width], 16).saved_share for width in (2, 4, 6)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.376, abs=0.03)
    assert shares[2] == pytest.approx(0.552, abs=0.07)
    samples = [study_samples(load, count, 16).saved_share for count in (2, 4, 6)]
    assert samples[0] == pytest.approx(0.061, abs=0.03)
    assert samples[2] == pytest.approx(0.098, abs=0.04)


def test_samples_at_the_lengths_of_sharegpt() -> None:
    """The paper: 16.2% to 30.5%."""
    load = load_of(161.31, 337.99)
    two, six = (study_samples(load, count, 16) for count in (2, 6))
    assert two.saved_share == pytest.approx(0.162, abs=0.02)
    assert six.saved_share == pytest.approx(0.305, abs=0.05)


def test_long_requests_count_for_as_long_as_they_run() -> None:
    short, long = Lengths(32, 8), Lengths(32, 800)
    both = study_samples([short, long], 2, 16)
    alone = study_samples([long], 2, 16)
    assert alone.saved_share < both.saved_share < alone.saved_share + 0.01
    assert both.saved_share_by_request > both.saved_share + 0.005
    assert alone.saved_share_by_request == pytest.approx(alone.saved_share)


def test_trees_come_back_from_their_file(tmp_path: Path) -> None:
    trees = [ForkTree(((0, 0), (1, 0)))]
    write_trees(tmp_path / "trees.json", trees, {})
    assert read_trees(tmp_path / "trees.json") == trees
    for text in ("{", "{}", '{"trees": []}', json.dumps({"trees": [[[0, 5]]]}), json.dumps({"trees": [[[0], [0, 0]]]})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError):
            read_trees(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="there are no fork trees"):
        read_trees(tmp_path / "none.json")
