"""Every way to end: a sentence and an exit code, and no traceback but for --debug."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from octavo.cli.main import octavo, run
from octavo.errors import ConfigError

HEAVY = ("numpy", "tokenizers", "uvicorn", "starlette", "jinja2", "rich", "gguf", "safetensors", "huggingface_hub")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def failing() -> Iterator[list[BaseException]]:
    """A command that raises what is put into the list."""
    errors: list[BaseException] = []

    @click.command("fail")
    def fail() -> None:
        raise errors[0]

    octavo.add_command(fail)
    yield errors
    del octavo.commands["fail"]


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["serve", "--help"], ["chat", "-h"], ["models", "-h"]]
)
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    done = python(
        f"import sys; from octavo.cli.main import run; code = run({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    assert done.returncode == 0
    assert done.stdout.startswith(("octavo ", "Usage: octavo"))
    assert done.stderr == "[]\n"


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    told = capsys.readouterr()
    assert all(name in told.err for name in ("serve", "chat", "generate", "pull", "models", "doctor"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["sevre"], "sevre"),
        (["serve"], "MODEL"),
        (["serve", "smollm2", "--port", "many"], "--port"),
        (["serve", "smollm2", "--prot", "1"], "--prot"),
        (["generate", "smollm2", "--kv-cache-memory", "much"], "--kv-cache-memory"),
        (["generate", "smollm2", "-f", "no-such-file"], "no-such-file"),
        (["generate", "smollm2", "-p", ""], "empty"),
        (["serve", "smollm2", "--chat-template", "no-such-file"], "no-such-file"),
        (["serve", "smollm2", "--log-level", "loud"], "loud"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("octavo: ")
    assert word in told.err
    assert "--help" in told.err
    assert len(told.err.splitlines()) == 1


def test_an_error_is_one_sentence_and_1(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(ConfigError("--threads is 0.5; it must be whole"))
    assert run(["fail"]) == 1
    assert capsys.readouterr().err == "octavo: --threads is 0.5; it must be whole\n"


def test_debug_adds_the_traceback(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(ConfigError("it is so"))
    assert run(["--debug", "fail"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("octavo: it is so\n")


def test_what_python_itself_raises_has_a_sentence(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    for error, words in (
        (MemoryError("Unable to allocate 9 EiB"), ["memory ran out", "9 EiB", "--kv-cache-memory"]),
        (ModuleNotFoundError("No module named 'uvicorn'"), ["uvicorn", "pip install ."]),
        (PermissionError(13, "Permission denied", "/there"), ["Permission denied", "/there"]),
        (OSError("broken"), ["broken"]),
    ):
        failing[:] = [error]
        assert run(["fail"]) == 1
        told = capsys.readouterr().err
        assert told.startswith("octavo: ")
        assert len(told.splitlines()) == 1
        assert all(word in told for word in words)


def test_a_fault_of_ours_is_not_dressed_up(failing: list[BaseException]) -> None:
    failing.append(AssertionError("ours"))
    with pytest.raises(AssertionError, match="ours"):
        run(["fail"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.exceptions.Abort()])
def test_ctrl_c_is_130_and_silent(
    error: BaseException, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert run(["fail"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_the_program_is_being_loaded_is_130_and_silent() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from octavo.cli.entry import entry\n"
        "entry()\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_is_the_entry() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["scripts"] == {"octavo": "octavo.cli.entry:entry"}


def test_a_reader_that_goes_away_is_141_and_silent() -> None:
    code = (
        "import click, sys\n"
        "from octavo.cli.main import octavo, run\n"
        "@octavo.command('talk')\n"
        "def talk():\n"
        "    for _ in range(100000): click.echo('x' * 100)\n"
        "sys.exit(run(['talk']))"
    )
    command = f'"{sys.executable}" -c "$CODE" | head -n 1 > /dev/null; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", f"export CODE={_quoted(code)}; {command}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 141
    assert done.stderr == ""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.mark.parametrize("arguments", [["serve", "m", "--port", "0"], ["generate", "m", "-p", "x"], ["chat", "m"]])
def test_missing_kernels_are_named_with_the_cure(
    arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = str(tmp_path_factory.mktemp("model"))
    done = python(
        "import sys; sys.modules['octavo.kernels._native'] = None\n"
        f"from octavo.cli.main import run; sys.exit(run({[model if word == 'm' else word for word in arguments]!r}))"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: the native kernels cannot be loaded")
    assert "pip install ." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bytes_that_are_no_text_are_one_sentence(command: str, tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-m", "octavo.cli.main", command, str(tiny_model), "--kv-cache-memory", "8MiB"],
        input=b"\xff\xfe\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        check=False,
        timeout=60,
    )
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(b"octavo: standard input is not UTF-8 text")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_without_the_characters_still_gets_an_answer(tiny_model: Path) -> None:
    flags = [
        "-p",
        "x",
        "--logit-bias",
        "150:100",
        "--max-tokens",
        "4",
        "--kv-cache-memory",
        "8MiB",
        "--temperature",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "generate", str(tiny_model), *flags],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"????\n"
