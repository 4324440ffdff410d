"""`octavo serve --executor sim`: the server of a machine that is not here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.sim_model import LETTERS, byte_tokenizer
from tests.cli.conftest import CommandLine
from tests.cli.test_serve import ask, end


def test_it_answers_as_an_openai_server_does() -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--executor", "sim", "--hardware", "H100"]
    command += ["--config", "smollm2-135m", "--port", "0", "--kv-cache-memory", "64MiB", "--max-model-len", "1024"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while not any("curl" in line for line in lines):
            line = process.stderr.readline()
            assert line, lines
            lines.append(line)
        assert any("degraded: answers are simulated: roofline of smollm2-135m on H100" in line for line in lines)
        found = re.search(r"ready: (http://\S+)/v1 serves smollm2-135m", "".join(lines))
        assert found is not None, lines
        url = found[1]
        body = {"model": "smollm2-135m", "prompt": "x" * 200, "max_tokens": 12, "seed": 4, "logprobs": 2}
        answer, again = (ask(f"{url}/v1/completions", body) for _ in range(2))
        text = answer["choices"][0]["text"]
        assert len(text) == 12
        assert set(text) <= set(LETTERS)
        assert again["choices"][0]["text"] == text
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 12
        chat = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "n": 2}
        assert len(ask(f"{url}/v1/chat/completions", chat)["choices"]) == 2
        beams = {**body, "use_beam_search": True, "n": 2, "logprobs": None}
        assert len(ask(f"{url}/v1/completions", beams)["choices"]) == 2
        status = ask(f"{url}/v1/kv/status")
        assert status["kv_bytes_per_block"] == 16 * 2 * 30 * 3 * 64 * 2
        assert status["hit_tokens"] > 0
        end(process, signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--executor", "sim"], 1, "needs --config"),
        (["--executor", "sim", "--config", "opt-13b"], 1, "needs --hardware, or --cost"),
        (["--executor", "sim", "--config", "opt-13b", "--hardware", "abacus"], 1, "is not in the catalogue"),
        (["--executor", "sim", "--config", "llama-2-70b", "--hardware", "L4"], 1, "no room for a KV cache"),
        (["--hardware", "H100", "smollm2"], 2, "--hardware is for --executor sim"),
        ([], 2, "Missing argument 'MODEL'"),
    ],
)
def test_what_cannot_be_pretended_is_said(
    arguments: list[str], code: int, message: str, command_line: CommandLine
) -> None:
    ended = command_line("serve", "--port", "0", *arguments)
    assert ended.code == code
    assert message in ended.err


def test_a_byte_is_a_token() -> None:
    tokenizer = byte_tokenizer()
    for text in ("plain text", "naïve 木 \x00\n", "<|end|>x"):
        ids = tokenizer.encode(text, False, parse_special=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_a_cost_model_of_its_own(tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({"cost": {}}))
    flags = ("--executor", "sim", "--config", "opt-13b", "--cost", tmp_path / "bad.json", "--port", "0")
    assert "is no cost model" in command_line("serve", *flags).err
