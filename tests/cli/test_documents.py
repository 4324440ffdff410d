"""What the documents point to exists: links, files, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import octavo as package
from octavo.cli.main import octavo

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
OURS = [
    path for path in DOCUMENTS if {"reference", "how-to", "tutorials"} & set(path.parts) or path.parent == REPOSITORY
]


@pytest.mark.parametrize("document", OURS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in re.findall("^#+ .*", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (document.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("document", OURS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_files_that_are_named_exist(document: Path) -> None:
    for name in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", document.read_text()):
        if not name.startswith("benchmarks/results"):
            assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("document", OURS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_python_that_is_shown_compiles_and_its_names_exist(document: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S):
        compile(block, str(document), "exec")
        for name in re.findall(r"\boctavo\.([A-Za-z_]\w*)", block):
            assert hasattr(package, name), name


@pytest.mark.parametrize("document", OURS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_commands_that_are_shown_can_be_read(document: Path) -> None:
    """Each `octavo ...` line of a code block, by the command's own parser; nothing is run."""
    for block in re.findall(r"^```\n(.*?)^```", document.read_text(), re.M | re.S):
        for line in block.splitlines():
            words = shlex.split(line, comments=True) if re.match(r"(\S*/)?octavo [a-z]", line) else []
            if words:
                command = octavo.commands[words[1]]
                command.make_context(words[1], words[2:])
