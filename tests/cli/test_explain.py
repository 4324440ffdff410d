"""`octavo explain`: every walk, with the model at work and without it, on the terminal and as a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli import explain as command
from octavo.cli.main import octavo, run
from octavo.planner.walks import walk as walks
from tests.models.tiny_models import make_tiny_model
from tests.planner.browser import Browser, find_chromium


def told(*arguments: str) -> str:
    done = CliRunner().invoke(octavo, ["explain", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("topic", command.TOPICS)
def test_every_walk_without_weights(topic: str) -> None:
    text = told(topic, "llama-2-7b", "--no-live")
    assert "llama-2-7b" in text or topic in command.WATCHED
    assert "easured on" not in text
    if topic in command.WATCHED:
        assert "computes nothing" in text


@pytest.mark.parametrize("topic", [*command.MEASURED, *command.WATCHED])
def test_every_walk_with_the_model_at_work(topic: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, max_position_embeddings=2048)
    text = told(topic, str(path))
    assert ("easured on this machine" in text) == (topic in command.MEASURED)
    assert ("The model ran" in text) == (topic in command.WATCHED)


def table(text: str, title: str) -> list[dict[str, str]]:
    """The rows of a table: cells are two spaces apart, a line without an indent ends it."""
    found = []
    for line in text.split(title)[1].splitlines()[1:]:
        if not line.startswith("  "):
            break
        found.append([cell.strip() for cell in line.strip().split("  ") if cell.strip()])
    return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def test_the_talk_of_five_turns_hits_what_the_turn_before_left() -> None:
    text = told("radix", "llama-2-7b", "--no-live")
    rows = table(text, "Hit and computed, turn by turn")
    prompts = [int(row["prompt tokens"]) for row in rows]
    hits = [int(row["hit tokens"]) for row in rows]
    for turn in range(1, 5):
        known = prompts[turn - 1] + 12 - 1  # the last token of an answer has no keys yet
        assert hits[turn] == known // 16 * 16 or known - 16 < hits[turn] <= known
    for row, prompt, hit in zip(rows, prompts, hits, strict=True):
        assert int(row["computed tokens"]) == prompt + 12 - 1 - hit


def test_a_shared_prompt_is_held_once() -> None:
    text = told("sharing", "llama-2-7b", "--no-live")
    rows = table(text, "What was found and what was computed")
    assert int(rows[0]["hit tokens"]) == 0
    system = int(text.split("one system prompt of ")[1].split()[0])
    assert all(system // 16 * 16 <= int(row["hit tokens"]) <= system for row in rows[1:])


def test_recompute_and_its_measurements_are_numbers_of_the_plan() -> None:
    text = told("recompute", "llama-2-7b", "--no-live")
    rows = table(text, "from its first token on")
    assert rows[0]["times"] == "1"
    assert float(rows[4]["times"]) > 100


def test_phases_say_what_bounds_them_on_a_device() -> None:
    text = told("phases", "llama-2-7b", "--no-live", "--gpu", "A100-80GB")
    rows = table(text, "Intensity by tokens of a step")
    bounds = {row["step"] + row["tokens"]: row["bound by"] for row in rows}
    assert bounds["prefill1"] == "memory"
    assert bounds["prefill1,024"] == "arithmetic"
    assert bounds["decode at 40961"] == "memory"


def test_pages_are_whole_and_fit_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "walk.html"
    for topic in command.TOPICS:
        told(topic, "llama-2-7b", "--no-live", "--html", str(page))
        text = page.read_text()
        assert text.startswith("<!doctype html>")
        assert "https://" not in text
        assert ("<svg" in text) == (topic not in command.WATCHED)
        program = find_chromium()
        if program is not None and topic in ("recompute", "radix"):
            with Browser(program, tmp_path / f"profile-{topic}") as browser:
                browser.resize(360, 740)
                browser.open(page)
                assert browser.value("document.documentElement.scrollWidth") <= 360


def test_markup_in_words_stays_words() -> None:
    made = walks.as_html(walks.Walk("<b>", (walks.Words("<i>"), walks.Table("<u>", [{"a": "<s>"}]))), "")
    for tag in ("<b>", "<i>", "<u>", "<s>"):
        assert tag not in made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], ("phases", "compression")),
        (["memory", "no-such-model"], ("llama-2-7b",)),
        (["phases", "llama-2-7b", "--gpu", "A1"], ("catalogue",)),
        (["memory", "llama-2-7b", "--html", "absent/folder/x.html"], ("--html", "cannot be written")),
        (["paging", "llama-2-7b", "--live"], ("llama-2-7b",)),
    ],
)
def test_errors(arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *arguments]) in (1, 2)
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_nothing_is_fetched_and_little_loaded_where_no_model_is_here(tmp_path: Path) -> None:
    code = (
        "import sys; from octavo.cli.main import run; assert run(['explain', 'radix']) == 0; "
        "heavy = ('numpy', 'octavo.kernels', 'tokenizers', 'starlette'); "
        "print(sorted(name for name in sys.modules if name.startswith(heavy)), file=sys.stderr)"
    )
    environment = {"PATH": "/usr/bin:/bin", "OCTAVO_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.strip() == "[]"
    assert "computes nothing" in done.stdout
