"""The alias gemma3-270m, end to end: as a user has it, weights and cache as `auto` chooses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.models import hub
from tests.cli.conftest import CommandLine


def test_generate(gemma3_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hub, "resolve", lambda reference, **_: gemma3_path if reference == "gemma3-270m" else Path(reference)
    )
    arguments = ("-p", "The capital of France is", "--max-tokens", "12", "--temperature", "0", "--max-model-len", "600")
    ended = command_line("generate", "gemma3-270m", *arguments)
    assert ended.code == 0, ended.err
    assert "France" in ended.out
