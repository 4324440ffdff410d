"""What a long history costs the next turn of a chat: time to the first token of cached turns, as text and as token ids.

    python benchmarks/serving/long_talk.py MODEL [--turns 100] [--json PATH]

One talk grows turn by turn through /v1/chat/completions. At some turns the same prompt, cached by then, is sent again
several times: as messages, which the server renders and encodes, and as the token ids that come of it, which it need
not. What both take is the model's and the protocol's time; what messages take more is that of template and tokenizer.
It measures the octavo of the interpreter that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PORT = 8125
URL = f"http://127.0.0.1:{PORT}"
WORDS = (
    "the river kept its own account of rain and stone while people upstream argued about the price of bridges".split()
)
AT = (1, 10, 25, 50, 100)


def first_token_s(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds to the first piece of an answer, and the whole answer."""
    start, first, text = time.perf_counter(), None, ""
    with client.stream("POST", URL + path, json={"model": "m", "stream": True, "temperature": 0, **body}) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code} {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            piece = choice.get("text") or choice.get("delta", {}).get("content")
            if piece:
                first = first or time.perf_counter() - start
                text += piece
    if first is None:
        raise SystemExit("an answer without text")
    return first, text


def measure(client: httpx.Client, messages: list[dict[str, str]], repeats: int) -> dict[str, float]:
    ids = client.post(URL + "/tokenize", json={"model": "m", "messages": messages}).json()["tokens"]
    times: dict[str, list[float]] = {"messages": [], "token_ids": []}
    for _ in range(repeats):
        times["messages"].append(
            first_token_s(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 4})[0]
        )
        times["token_ids"].append(first_token_s(client, "/v1/completions", {"prompt": ids, "max_tokens": 4})[0])
    medians = {name: statistics.median(found) for name, found in times.items()}
    text = medians["messages"] - medians["token_ids"]
    return {
        "prompt_tokens": len(ids),
        "messages_ms": round(1e3 * medians["messages"], 3),
        "token_ids_ms": round(1e3 * medians["token_ids"], 3),
        "text_share": round(text / medians["messages"], 3),
    }


def talk(turns: int, repeats: int) -> dict[str, dict[str, float]]:
    found, messages = {}, [{"role": "system", "content": "You answer in one short sentence."}]
    with httpx.Client(timeout=300) as client:
        for turn in range(1, turns + 1):
            said = " ".join(WORDS[(turn * 7 + i) % len(WORDS)] for i in range(24))
            messages.append({"role": "user", "content": f"{turn}: {said}?"})
            _, answer = first_token_s(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 16})
            if turn in AT or turn == turns:
                found[str(turn)] = measure(client, messages, repeats)
                print(turn, found[str(turn)], flush=True)
            messages.append({"role": "assistant", "content": answer})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    command = [sys.executable, "-m", "octavo.cli.main", "serve", given.model, "--port", str(PORT)]
    process = subprocess.Popen(
        [*command, "--served-model-name", "m"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                httpx.get(URL + "/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        turns = talk(given.turns, given.repeats)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    result = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "machine": machine, "turns": turns}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
