"""`octavo chat` from a pipe: messages, commands, the cache of the history, and what goes wrong in between."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli.chat import HELP
from tests.cli.conftest import CommandLine
from tests.models.tiny_models import make_tiny_model

FLAGS = ("--temperature", "0", "--ignore-eos", "--max-tokens", "20", "--kv-cache-memory", "8MiB", "--threads", "1")


def test_the_history_is_answered_from_the_cache(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("chat", tiny_model, *FLAGS, stdin="tell me a story\nand another one\n/stats\n")
    assert ended.code == 0, ended.err
    first, second, cache = ended.out.splitlines()[-3:]
    counts = [
        re.match(rf"turn {number}: (\d+) prompt tokens, (\d+) of them cached .*, 20 new; first token", line)
        for number, line in ((1, first), (2, second))
    ]
    assert counts[0] is not None
    assert counts[1] is not None
    (prompt, cached), (next_prompt, next_cached) = (map(int, count.groups()) for count in counts if count)
    assert cached == 0
    assert prompt < next_cached < next_prompt
    assert cache.startswith("KV cache: ")
    assert f"{next_cached} of {prompt + next_prompt} prompt tokens were hits" in cache


def test_commands(tiny_model: Path, command_line: CommandLine) -> None:
    typed = "/help\n/stats\n/system\n/system Be brief.\n/system\n/reset\n/wat\n\n/quit\nnever read\n"
    ended = command_line("chat", tiny_model, *FLAGS, stdin=typed)
    assert ended.code == 0
    said = ended.out.removeprefix(HELP + "\n").splitlines()
    assert said[0] == "no turns yet"
    assert said[1].startswith("KV cache: ")
    assert said[2:] == [
        "no system prompt",
        "the conversation starts over with this system prompt",
        "Be brief.",
        "the conversation starts over",
        "there is no command /wat; /help lists them",
    ]


def test_a_branch_hits_the_turns_that_it_shares(tiny_model: Path, command_line: CommandLine) -> None:
    typed = "tell me a story\nand another one\n/branch 1 other\nsomething else\n/stats\n/back\n/switch main\n/branch\n"
    ended = command_line("chat", tiny_model, *FLAGS, stdin=typed)
    assert ended.code == 0, ended.err
    assert "in the new branch other, behind turn 1" in ended.out
    _, _, stats = ended.out.partition("branch other:\n")
    (first, _), (second, cached) = re.findall(r"turn \d: (\d+) prompt tokens, (\d+) of them cached", stats)[:2]
    assert int(first) < int(cached) < int(second)
    assert ended.out.endswith(
        "back before: something else (1 turn left)\nin the branch main, behind turn 2\nbranch main, 2 turns:\n"
        "  1  tell me a story\n  2  and another one\nbranch other, 1 turn, the first 1 of them the same\n"
        "/branch N [NAME] goes on behind turn N, /switch NAME goes to another branch\n"
    )


def test_the_system_prompt_is_part_of_the_conversation(tiny_model: Path, command_line: CommandLine) -> None:
    def prompt_tokens(*flags: str, typed: str = "") -> int:
        ended = command_line("chat", tiny_model, *FLAGS, *flags, stdin=f"{typed}hello\n/stats\n")
        found = re.search(r"turn 1: (\d+) prompt tokens", ended.out)
        assert found is not None, ended
        return int(found[1])

    assert prompt_tokens("--system", "Be brief.") == prompt_tokens(typed="/system Be brief.\n") > prompt_tokens()


def test_a_message_of_several_lines_is_one_turn(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("chat", tiny_model, *FLAGS, stdin='"""\n/quit\nis a word\n"""\none \\\ntwo\n/stats\n')
    assert "turn 2:" in ended.out
    assert "turn 3:" not in ended.out


def test_a_message_that_does_not_fit_is_told_and_dropped(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("chat", tiny_model, *FLAGS, stdin=f"{'word ' * 600}\nhello\n/stats\n")
    assert ended.code == 0
    assert ended.err.startswith("octavo: ")
    assert "512" in ended.err
    assert "/reset" in ended.err
    assert "turn 1:" in ended.out
    assert "turn 2:" not in ended.out


def test_a_cut_answer_is_told(tiny_model: Path, command_line: CommandLine) -> None:
    assert "[the answer was cut" in command_line("chat", tiny_model, *FLAGS, stdin="hello\n").err


def test_a_model_without_a_template_is_told(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.name != "tokenizer_config.json":
            (bare / file.name).symlink_to(file)
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    ended = command_line("chat", bare, stdin="hello\n")
    assert ended.code == 1
    assert "has no chat template; give one with --chat-template FILE" in ended.err


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals on Windows")
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    """On a terminal, as a user has it: Ctrl-C in an answer, Ctrl-C at the prompt, Ctrl-D."""
    # An answer of up to 8,192 tokens, each of which computes all before it again: it does not end by itself in time.
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=8192)
    ours, theirs = pty.openpty()
    flags = ("--ignore-eos", "--temperature", "0", "--threads", "1", "--kv-cache-memory", "8MiB", "--no-kv-cache")
    command = [sys.executable, "-m", "octavo.cli.main", "chat", str(model), *flags]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=hear_interrupts
    )
    os.close(theirs)
    try:
        screen = Screen(ours)
        screen.wait_for("> ")
        os.write(ours, b"tell me a story\n")
        screen.wait_for("tell me a story\r\n")
        screen.wait_for_anything()
        os.kill(process.pid, 2)
        screen.wait_for("[stopped]")
        screen.wait_for("> ")
        # Between the prompt and the wait for a key a signal stays unseen until the next one (in Python's own input).
        while not screen.shows("(Ctrl-D or /quit leaves)", within_s=1.0):
            os.kill(process.pid, 2)
        screen.wait_for("> ")
        os.write(ours, b"/stats\n")
        screen.wait_for("turn 1:")
        screen.wait_for("> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def hear_interrupts() -> None:
    """A suite that runs in the background of a shell ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """What a program wrote to its terminal, read on as far as a text."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._text = ""

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + 60
        while text not in self._text:
            self._read(deadline_s, text)
        self._text = self._text[self._text.index(text) + len(text) :]

    def shows(self, text: str, within_s: float) -> bool:
        """Whether the text is there, or comes soon."""
        ready, _, _ = select.select([self._terminal], [], [], within_s)
        if ready:
            self._text += os.read(self._terminal, 4096).decode(errors="replace")
        return text in self._text

    def wait_for_anything(self) -> None:
        while not self._text:
            self._read(time.monotonic() + 60, "anything")

    def _read(self, deadline_s: float, text: str) -> None:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"{text!r} did not come; the screen has {self._text!r}"
        self._text += os.read(self._terminal, 4096).decode(errors="replace")
