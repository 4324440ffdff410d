"""`octavo serve --record`: a live run of mixed load, done again by another process, event by event (law 3)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.replay.event_lines import BLOCK_EVENTS
from tests.cli.conftest import CommandLine
from tests.cli.test_serve import ask, end, serving, url_of

SECRET = "a secret that no recording may hold"
POOL = (
    "--kv-cache-memory",
    "240KiB",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "48",
)


def body_of(number: int) -> dict[str, Any]:
    prompt = f"{SECRET}. " * (1 + number % 3) + f"Question {number % 5}?"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 60 + number * 7 % 50, "ignore_eos": True}
    if number % 6 == 1:
        return {**body, "n": 3, "max_tokens": 12}
    if number % 6 == 3:
        return {**body, "n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0, "max_tokens": 10}
    if number % 6 == 5:
        return {**body, "n": 1, "best_of": 2, "max_tokens": 12, "stop": ["e"]}
    return body


def leave_early(url: str) -> None:
    """A client that goes away in the middle of its answer."""
    parts = urllib.parse.urlsplit(url)
    body = json.dumps({**body_of(0), "max_tokens": 120, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        connection.recv(200)


@pytest.fixture(scope="module")
def recording(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    flags = ("--served-model-name", "tiny", "--seed", "5", "--api-key", "one", "--record", str(path), *POOL)
    with serving(tiny_model, *flags) as (process, lines):
        assert any("masked token ids, no text" in line for line in lines)
        url = url_of(lines)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: ask(f"{url}/v1/completions", body_of(number), "one"), range(36)))
            for _ in range(2):
                with contextlib.suppress(OSError):
                    leave_early(url)
        assert len(answers) == 36
        curve = ask(f"{url}/v1/kv/mrc", None, "one")
        at_one = next(point for point in curve["curve"] if point["scale"] == 1.0)
        assert curve["lookup_blocks"] > 20
        assert abs(at_one["hit_rate"] - curve["hit_rate"]) < 0.1, "a small load; tests/replay compares closely"
        end(process, signal.SIGTERM)
    return path


def test_another_process_does_the_same(recording: Path) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "replay", str(recording), "--mode", "events", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_same"]
    assert found["is_whole"]
    assert set(found["events"]) >= set(BLOCK_EVENTS), "a load of every kind"
    assert found["resident_blocks"] == found["cached_blocks"] > 0


def test_no_text_is_in_it(recording: Path) -> None:
    text = recording.read_text()
    assert "secret" not in text
    assert "Question" not in text


def test_text_is_in_it_when_it_is_asked_for(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    path = tmp_path / "run.jsonl"
    with serving(tiny_model, "--served-model-name", "tiny", "--record", str(path), "--record-text") as (process, lines):
        assert any("all that is asked and answered as text" in line for line in lines)
        answer = ask(f"{url_of(lines)}/v1/completions", {**body_of(0), "max_tokens": 8, "temperature": 0, "seed": 1})
        end(process, signal.SIGTERM)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(body_of(0)["prompt"] in line.get("text", "") for line in found if "add" in line)
    (said,) = [line["text"] for line in found if "answer" in line]
    assert answer["choices"][0]["text"].strip("\ufffd") in said
    assert command_line("replay", path, "--mode", "events").code == 0
    refused = command_line("serve", tiny_model, "--record-text")
    assert refused.code == 2
    assert "--record-text goes with --record FILE" in refused.err


def test_a_change_is_told(recording: Path, tmp_path: Path, command_line: CommandLine) -> None:
    lines = recording.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"event":["evict"' in line)
    event = json.loads(lines[at])
    event["event"][1][0][0] += 1
    lines[at] = json.dumps(event)
    (tmp_path / "changed.jsonl").write_text("\n".join(lines))
    ended = command_line("replay", tmp_path / "changed.jsonl", "--mode", "events")
    assert ended.code == 1
    assert f"(line {at + 1}) differs: recorded" in ended.out
    assert "differs from the recording" in ended.err


def test_it_is_a_trace_of_the_other_modes(recording: Path, command_line: CommandLine) -> None:
    ended = command_line("replay", recording, "--mode", "cache", "--json")
    found = json.loads(ended.out)
    assert found["requests"] == 38 - 2 + sum('"add"' in line for line in recording.read_text().splitlines()) - 36
    assert found["hit_rate"] > 0.2
    assert json.loads(command_line("replay", recording, "--mode", "timed", "--json").out)["hit_tokens"] > 0


def test_what_is_no_recording_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    for text in ("", "{}", "words"):
        (tmp_path / "x").write_text(text)
        ended = command_line("replay", tmp_path / "x", "--mode", "events")
        assert ended.code == 1
        assert "no recording of version 1" in ended.err


def test_a_file_that_cannot_be_written_is_said_before_it_serves(tiny_model: Path, command_line: CommandLine) -> None:
    ended = command_line("serve", tiny_model, "--port", "0", "--record", tiny_model / "none" / "x.jsonl")
    assert ended.code == 1
    assert "No such file or directory" in ended.err
