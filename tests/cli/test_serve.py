"""`octavo serve` as a process: its boot lines, its first answer, its end, and what keeps it from starting."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.boot import curl_line
from tests.cli.conftest import CommandLine

FLAGS = ("--kv-cache-memory", "8MiB", "--threads", "1", "--port", "0")


@contextmanager
def serving(model: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and the lines that it said until it was ready."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), *FLAGS, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not any("curl" in line for line in lines):
            line = process.stderr.readline()
            assert line, f"it ended with {process.wait()} after {lines}"
            lines.append(line.rstrip("\n"))
        yield process, lines
    finally:
        process.kill()
        process.communicate()


def url_of(lines: list[str]) -> str:
    ready = re.match(r"ready: (http://\S+)/v1 serves [^;]+; try", lines[-2])
    assert ready is not None, lines
    return ready[1]


def ask(url: str, body: dict[str, Any] | None = None, key: str | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """The rest of what it says, after the signal; it must end with 0."""
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    return rest


def test_it_says_what_it_serves_answers_the_line_that_it_shows_and_ends(tiny_model: Path) -> None:
    with serving(tiny_model, "--served-model-name", "tiny", "--seed", "3") as (process, lines):
        assert re.fullmatch(r"octavo: \S+, weights f32 \([\d.]+ [KM]iB\), KV cache f32, \w+, 1 thread", lines[0]), lines
        plan = re.fullmatch(
            r"KV cache: (\d+) blocks x 16 = (\d+) tokens \((\d+) bytes\), "
            r"maximum concurrency for 512 tokens per request: ([\d.]+)x",
            lines[1],
        )
        assert plan is not None, lines
        num_blocks, num_tokens, num_bytes = (int(text) for text in plan.groups()[:3])
        assert num_tokens == num_blocks * 16
        assert num_bytes <= 8 << 20
        assert float(plan[4]) == pytest.approx(num_tokens / 512, abs=0.01)
        url = url_of(lines)
        assert lines[3] == curl_line(url, "tiny", is_chat=True, needs_key=False)
        words = shlex.split(lines[3])
        body = json.loads(words[words.index("-d") + 1])
        answer = ask(words[1], {**body, "ignore_eos": True})
        assert answer["model"] == "tiny"
        assert answer["usage"]["completion_tokens"] == 64
        status = ask(f"{url}/v1/kv/status")
        assert status["num_blocks"] == num_blocks
        assert status["num_blocks"] * status["kv_bytes_per_block"] == num_bytes
        memory = status["memory"]
        assert num_bytes == memory["kv_bytes"] == memory["kv_allocated_bytes"] == status["kv_bytes"]
        assert memory["weights_held_bytes"] > 0
        assert memory["peak_resident_bytes"] > 0
        last = end(process, signal.SIGTERM)
        assert "octavo: stopped by SIGTERM; every request had its answer" in last
        assert re.search(r"octavo: at most (\d+) bytes were resident, under the \d+ that were planned", last)


def test_the_plan_of_the_planner_is_the_servers(tiny_model: Path) -> None:
    """`octavo plan` says beforehand what the status says of the running server."""
    from click.testing import CliRunner

    from octavo.cli.main import octavo

    done = CliRunner().invoke(octavo, ["plan", str(tiny_model), "--kv-cache-memory", "8MiB", "--json"])
    planned = json.loads(done.output)
    with serving(tiny_model, "--log-level", "info") as (process, lines):
        status = ask(f"{url_of(lines)}/v1/kv/status")
        for key in ("num_blocks", "block_size", "kv_bytes_per_block", "kv_bytes_per_token"):
            assert planned[key] == status[key], key
        (ours,), (theirs,) = planned["kv_groups"], status["kv_groups"]
        for key in set(ours) & set(theirs):
            assert ours[key] == theirs[key], key
        assert any("allocated as planned" in line for line in lines)
        end(process, signal.SIGTERM)


def test_requests_without_a_seed_repeat_with_the_servers(tiny_model: Path) -> None:
    texts = []
    for seed in ("3", "3", "4"):
        with serving(tiny_model, "--seed", seed, "--served-model-name", "tiny") as (process, lines):
            body = {"model": "tiny", "prompt": "once", "max_tokens": 16, "ignore_eos": True, "temperature": 1}
            url = f"{url_of(lines)}/v1/completions"
            texts.append([ask(url, body)["choices"][0]["text"] for _ in range(2)])
            end(process, signal.SIGINT)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_keys_of_flag_and_environment_open_it(tiny_model: Path) -> None:
    with serving(tiny_model, "--api-key", "one", OCTAVO_API_KEY="two, three") as (process, lines):
        assert "-H 'Authorization: Bearer KEY'" in lines[-1]
        assert lines[-2].endswith("; try, with one of the keys for KEY")
        url = f"{url_of(lines)}/v1/models"
        for key in ("one", "two", "three"):
            assert ask(url, key=key)["data"]
        for wrong in (None, "four", "two, three"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(url, key=wrong)
        end(process, signal.SIGTERM)


@pytest.mark.parametrize("flags", [(), ("--access-log",), ("--log-level", "info")], ids=" ".join)
def test_what_is_logged_is_what_was_asked_for(flags: tuple[str, ...], tiny_model: Path) -> None:
    with serving(tiny_model, "--served-model-name", "tiny", *flags) as (process, lines):
        ask(f"{url_of(lines)}/v1/completions", {"model": "tiny", "prompt": "once", "max_tokens": 3, "ignore_eos": True})
        rest = end(process, signal.SIGTERM)
    assert ('"POST /v1/completions HTTP/1.1" 200' in rest) == ("--access-log" in flags)
    assert ("3 output tokens" in rest) == ("--log-level" in flags)


def test_what_is_degraded_is_said(tiny_model: Path) -> None:
    with serving(tiny_model, "--kv-cache-memory", "100KiB", "--no-kv-cache") as (process, lines):
        degraded = [line for line in lines if line.startswith("degraded: ")]
        assert len(degraded) == 1
        assert "512" in degraded[0]
        assert any(line.startswith("--no-kv-cache: ") for line in lines)
        assert ask(f"{url_of(lines)}/v1/kv/status")["degraded"] == [degraded[0].removeprefix("degraded: ")]
        end(process, signal.SIGTERM)


def test_a_taken_port_is_told_before_the_model_is_looked_for(command_line: CommandLine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = command_line("serve", "no-such-model", "--port", port)
    assert ended.code == 1
    assert ended.err.startswith(f"octavo: port {port} on 127.0.0.1 is taken")
    assert "--port" in ended.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "70000"), ["--port is 70000", "65535"]),
        (("--host", "192.0.2.1"), ["192.0.2.1", "--host"]),
        (("--api-key", ""), ["key"]),
        (("--shutdown-timeout", "-1"), ["--shutdown-timeout is -1", "at least 0"]),
        (("--body-timeout", "0"), ["--body-timeout is 0", "more than 0"]),
        (("--max-waiting", "0"), ["--max-waiting is 0", "at least 1"]),
        (("--max-body-bytes", "0"), ["--max-body-bytes", "at least 1"]),
        (("--quantization", "awq"), ["--quantization awq", "GGUF"]),
        (("--tensor-parallel-size", "2"), ["--tensor-parallel-size 2", "--threads"]),
    ],
)
def test_what_cannot_be_had_is_told_before_the_model_is_looked_for(
    flags: tuple[str, ...], words: list[str], command_line: CommandLine
) -> None:
    ended = command_line("serve", "no-such-model", *flags)
    assert ended.code in (1, 2)
    assert ended.err.startswith("octavo: ")
    assert len(ended.err.splitlines()) == 1
    for word in words:
        assert word in ended.err


def test_the_line_to_try_survives_a_shell() -> None:
    line = curl_line("http://127.0.0.1:1", "it's", is_chat=False, needs_key=False)
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_request_that_does_not_end_in_time_is_aborted_and_told(signals: int, tiny_model: Path) -> None:
    """The first signal gives it --shutdown-timeout, a second one nothing."""
    timeout = "0.05" if signals == 1 else "600"
    flags = ("--no-kv-cache", "--shutdown-timeout", timeout, "--served-model-name", "m", "--log-level", "info")
    with serving(tiny_model, *flags) as (process, lines):
        body = {"model": "m", "prompt": "once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url_of(lines)}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")  # it runs
            if signals == 2:
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                while "finishing running requests" not in process.stderr.readline():
                    pass  # two signals that come together are one
            rest = end(process, signal.SIGINT)
            told = answer.read().decode()
    assert "1 request was aborted" in rest
    assert '"error"' in told
    assert "abort" in told
