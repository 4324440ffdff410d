"""Branches of one request over a socket, on SmolLM2: each is the request that it stands for, and all of them end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.seeds import branch_seed
from tests.e2e.background_server import BackgroundServer, kv_status

PROMPT = "My three favourite animals, and why I like each of them so much, are:"


@pytest.fixture(scope="module")
def address(smollm2_path: Path) -> Iterator[str]:
    server = BackgroundServer(smollm2_path)
    try:
        yield server.start()
    finally:
        server.stop()


def complete(address: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, **fields}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(address: str, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices, put together from the pieces, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    body = {"prompt": PROMPT, "temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for piece in event["choices"]:
                found = choices.setdefault(piece["index"], {"text": "", "ends": []})
                found["text"] += piece["text"]
                if piece["finish_reason"] is not None:
                    found["ends"].append((piece["finish_reason"], piece["stop_reason"]))
    return [choices[index] for index in sorted(choices)], usage


def wait_until_idle(address: str) -> dict[str, Any]:
    while (status := kv_status(address))["running"] or status["waiting"]:
        time.sleep(0.01)
    return status


def test_streamed_choices_are_the_requests_with_their_seeds(address: str) -> None:
    choices, usage = streamed(address, n=3, seed=11, max_tokens=24)
    alone = [complete(address, seed=branch_seed(11, branch), max_tokens=24) for branch in range(3)]
    assert [choice["text"] for choice in choices] == [one["choices"][0]["text"] for one in alone]
    assert len({choice["text"] for choice in choices}) == 3
    assert all(len(choice["ends"]) == 1 for choice in choices)
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)


def test_a_stream_that_is_left_frees_all_its_branches(address: str) -> None:
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
        during = kv_status(address)
        assert during["running"] == 4
        assert during["used_blocks"] > 0
        assert during["branch_saved_blocks"] > 0
    after = wait_until_idle(address)
    assert after["used_blocks"] == after["branch_saved_blocks"] == 0
    assert after["free_blocks"] + after["cached_blocks"] == after["num_blocks"]
    assert after["branch_peak_saved_blocks"] >= during["branch_saved_blocks"]


def test_a_stop_string_ends_its_own_branch_only(address: str) -> None:
    free = complete(address, n=3, seed=11, max_tokens=24, ignore_eos=True)
    texts = [choice["text"] for choice in free["choices"]]
    stop, stopped = next(
        (text[start : start + 5], number)
        for number, text in enumerate(texts)
        for start in range(8, len(text) - 5)
        if not any(text[start : start + 5] in other for other in texts if other != text)
    )
    for choices in (
        streamed(address, n=3, seed=11, max_tokens=24, ignore_eos=True, stop=stop)[0],
        [
            {"text": one["text"], "ends": [(one["finish_reason"], one["stop_reason"])]}
            for one in complete(address, n=3, seed=11, max_tokens=24, ignore_eos=True, stop=stop)["choices"]
        ],
    ):
        for number, (choice, text) in enumerate(zip(choices, texts, strict=True)):
            if number == stopped:
                assert (choice["text"], choice["ends"]) == (text[: text.index(stop)], [("stop", stop)])
            else:
                assert (choice["text"], choice["ends"]) == (text, [("length", None)])
    assert wait_until_idle(address)["used_blocks"] == 0


def test_beams_and_samples_beside_each_other_leave_nothing_behind(address: str) -> None:
    complete(address, use_beam_search=True, best_of=4, n=4, max_tokens=12)
    complete(address, n=2, best_of=4, max_tokens=12, seed=1)
    status = wait_until_idle(address)
    assert (status["used_blocks"], status["branch_saved_blocks"]) == (0, 0)
    assert status["free_blocks"] + status["cached_blocks"] == status["num_blocks"]
