"""What the tests of the commands share: a tiny model, and the command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.cli.main import run
from tests.models.tiny_models import make_tiny_model


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


CommandLine = Callable[..., Ended]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a context of 512 tokens, in f32."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """command_line("generate", "m", "-p", "x", stdin="") runs octavo and gives what came of it."""

    def call(*arguments: str | Path, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return Ended(code, told.out, told.err)

    return call
