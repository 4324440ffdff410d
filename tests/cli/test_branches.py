"""`octavo generate` with several branches: --n, --best-of, --beams, and the drawing of what they share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.branch_view import blocks_of, summary
from octavo.core.seeds import branch_seed
from octavo.core.sharing import BranchMemory, BranchTable, Sharing
from tests.cli.conftest import CommandLine, Ended

PROMPT = "The quick brown fox jumps over the lazy dog, and then over the next one."
COMMON = ("-p", PROMPT, "--ignore-eos", "--max-tokens", "12", "--kv-cache-memory", "8MiB", "--threads", "1")


def first_object(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


def test_answer_i_is_the_one_with_the_seed_of_branch_i(tiny_model: Path, command_line: CommandLine) -> None:
    together = first_object(command_line("generate", tiny_model, *COMMON, "--json", "--n", "3", "--seed", "5"))
    assert together["answers"][0]["text"] == together["text"]
    for branch, one in enumerate(together["answers"]):
        seed = str(branch_seed(5, branch))
        alone = first_object(command_line("generate", tiny_model, *COMMON, "--json", "--seed", seed))
        assert one["token_ids"] == alone["token_ids"]
        assert "answers" not in alone
    assert together["usage"]["completion_tokens"] == 36
    assert together["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert together["branches"]["peak_saved_blocks"] > 0


def test_answers_are_shown_one_below_the_other(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("generate", tiny_model, *COMMON, "--n", "2", "--seed", "5")
    assert ended.code == 0
    assert ended.out.startswith("--- 1.1: The quick brown fox")
    assert "\n--- 1.2: The quick brown fox" in ended.out
    assert re.search(r"^octavo: 2 answers, \d+ prompt tokens .*, 24 new tokens", ended.err, re.M)
    assert re.search(r"^octavo: branches saved \d+ blocks \(\d+%\) at the peak \(\d+ held instead", ended.err, re.M)


def test_beams(tiny_model: Path, command_line: CommandLine) -> None:
    flags = ("--json", "--beams", "4", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "never")
    found = first_object(command_line("generate", tiny_model, *COMMON, *flags))
    best, other = found["answers"]
    assert best["score"] >= other["score"]
    assert best["token_ids"] != other["token_ids"]
    greedy = first_object(command_line("generate", tiny_model, *COMMON, "--json", "--temperature", "0"))
    one = first_object(command_line("generate", tiny_model, *COMMON, "--json", "--beams", "1"))
    assert one["token_ids"] == greedy["token_ids"]


def test_best_of(tiny_model: Path, command_line: CommandLine) -> None:
    found = first_object(command_line("generate", tiny_model, *COMMON, "--json", "--best-of", "4", "--seed", "1"))
    assert found["usage"]["completion_tokens"] == 48
    assert found["score"] < 0
    assert "answers" not in found


def test_the_memory_is_drawn_where_nobody_looks_at_once(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("generate", tiny_model, *COMMON, "--beams", "3", "--show-memory")
    assert ended.code == 0, ended.err
    assert "block tables of 3 branches" in ended.err
    assert ended.err.count("■") >= 4
    assert "blocks held instead of" in " ".join(ended.err.split())


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--beams", "2", "--best-of", "3"), 2, "exclude each other"),
        (("--beams", "2", "--n", "3"), 2, "as many texts as --beams (2)"),
        (("--beams", "0"), 2, "--beams"),
        (("--show-memory",), 2, "give --n, --best-of or --beams above 1"),
        (("--n", "3", "--best-of", "2"), 1, "--best-of is 2"),
        (("--n", "0"), 1, "--n is 0"),
        (("--length-penalty", "2"), 1, "--length-penalty is 2.0"),
        (("--beams", "2", "--early-stopping", "soon"), 2, "true, false and never"),
        (("--beams", "2", "--temperature", "0.5"), 1, "--temperature is 0.5"),
        (("--n", "65"), 1, "at most 64 requests run at once"),
    ],
)
def test_what_cannot_be_had(
    tiny_model: Path, command_line: CommandLine, flags: tuple[str, ...], code: int, words: str
) -> None:
    ended = command_line("generate", tiny_model, *COMMON, *flags)
    assert ended.code == code, ended.err
    assert words in ended.err


def test_a_drawing_marks_shared_blocks_and_cuts_long_runs() -> None:
    row = BranchTable(1, 200, (tuple(range(13)),), 10)
    assert blocks_of(row, 0).plain == "■0 ■1 ■2 ■(4 more) ■7 ■8 ■9 □10 □11 □12"
    short = BranchTable(0, 40, ((7, 8, 9),), 2)
    assert blocks_of(short, 0).plain == "■7 ■8 □9"
    memory = BranchMemory("r", (short, short), 4, Sharing(2, 6, 9))
    told = "sharing saves 2 blocks (33%) now, 6 blocks (40%) at the peak (9 held instead of 15)"
    assert summary(memory) == f"4 blocks held instead of 6: {told}"


def test_what_a_window_has_passed_is_not_drawn() -> None:
    row = BranchTable(0, 80, ((1, 2, 3, 4, 5), (-1, -1, 7, 8, 9)), 4)
    assert blocks_of(row, 0).plain.replace("■", "").split() == ["1", "2", "3", "4", "□5"]
    assert blocks_of(row, 1).plain.replace("■", "").split() == ["7", "8", "□9"]
