"""Several answers to a prompt: n, best_of, beam search, scores of the prompt, and the memory that branches save."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.seeds import branch_seed
from octavo.engine.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from tests.server.http_case import events_of, model_info, run, served

PROMPT = "Enough words to fill a block or two of the cache."
CHAT = {"messages": [{"role": "user", "content": "Say hello."}]}


def by_choice(payloads: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for payload in payloads:
        for choice in payload["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("stream", [False, True])
def test_choice_i_is_the_request_with_the_seed_of_branch_i(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            seeds = [branch_seed(7, branch) for branch in range(3)]
            alone = [
                (await server.complete(prompt=PROMPT, max_tokens=9, seed=seed))["choices"][0]["text"] for seed in seeds
            ]
            body = {"prompt": PROMPT, "max_tokens": 9, "seed": 7, "n": 3, "stream": stream}
            answer = await server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            assert by_choice(payloads) == dict(enumerate(alone))

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_a_prompt_once_and_all_drawn_tokens(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            body = {"prompt": [PROMPT, "Another."], "max_tokens": 5, "n": 3, "seed": 1, **options}
            answer = await server.post("/v1/completions", body)
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            assert sorted(by_choice(payloads)) == list(range(6))
            usage = payloads[-1]["usage"]
            assert usage["prompt_tokens"] == len(PROMPT) + len("Another.")
            assert usage["completion_tokens"] == 6 * 5
            assert usage["total_tokens"] == usage["prompt_tokens"] + 30
            assert usage["octavo"]["branch_peak_saved_blocks"] >= 2 * (len(PROMPT) // 16)
            assert usage["octavo"]["branch_peak_blocks"] > 0

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_chat(tokenizer: Tokenizer, stream: bool) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            body = {**CHAT, "n": 2, "max_tokens": 6, "seed": 3, "logprobs": True, "stream": stream}
            answer = await server.post("/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text
            texts = ["", ""]
            if stream:
                roles: list[int] = []
                for payload in events_of(answer.text)[:-1]:
                    for choice in payload["choices"]:
                        roles += [choice["index"]] if "role" in choice["delta"] else []
                        texts[choice["index"]] += choice["delta"].get("content", "")
                assert sorted(roles) == [0, 1]
            else:
                choices = answer.json()["choices"]
                texts = [choice["message"]["content"] for choice in choices]
                assert [len(choice["logprobs"]["content"]) for choice in choices] == [6, 6]
            alone = [
                (await server.chat(max_tokens=6, seed=branch_seed(3, branch)))["choices"][0]["message"]["content"]
                for branch in range(2)
            ]
            assert texts == alone
            assert texts[0] != texts[1]

    run(work)


def test_best_of_gives_the_most_likely_first_and_counts_all(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.complete(prompt=PROMPT, max_tokens=4, best_of=5, n=2, seed=2, logprobs=0)
            scores = [choice["octavo"]["score"] for choice in answer["choices"]]
            assert scores == sorted(scores, reverse=True)
            for choice in answer["choices"]:
                assert choice["octavo"]["score"] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]))
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 20
            more = await server.complete(prompt=PROMPT, max_tokens=4, best_of=5, n=4, seed=2)
            assert [choice["octavo"]["score"] for choice in more["choices"]][:2] == scores
            every = await server.complete(prompt=PROMPT, max_tokens=4, n=5, seed=2)
            texts = {choice["text"] for choice in every["choices"]}
            assert {choice["text"] for choice in more["choices"]} < texts
            assert not any("octavo" in choice for choice in every["choices"])

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beam_search(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        advice = {"temperature": 0.2, "top_k": 50, "top_p": 0.9}  # which is for drawing
        async with served(tokenizer, info=model_info(default_sampling=advice)) as server:
            prompt = CHAT if path.endswith("chat/completions") else {"prompt": PROMPT}
            body = {**prompt, "use_beam_search": True, "best_of": 4, "n": 3, "max_tokens": 6}
            answers = [
                await server.post(path, {**body, **more})
                for more in ({}, {"length_penalty": 0.0, "early_stopping": "never"}, {"early_stopping": True})
            ]
            for answer in answers:
                assert answer.status_code == 200, answer.text
                choices = answer.json()["choices"]
                scores = [choice["octavo"]["score"] for choice in choices]
                assert [choice["index"] for choice in choices] == [0, 1, 2]
                assert scores == sorted(scores, reverse=True)
                assert "octavo" in answer.json()["usage"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_scores_the_prompt(tokenizer: Tokenizer, stream: bool, n: int) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            prompt = "Greetings, and enough words to fill some blocks of the cache twice."
            tokens = len(prompt.encode())
            await server.complete(prompt=prompt, max_tokens=1)  # now it is in the cache
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "n": n, "seed": 1, "stream": stream}
            options = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await server.post("/v1/completions", {**body, **options})
            assert answer.status_code == 200, answer.text
            payloads = events_of(answer.text)[:-1] if stream else [answer.json()]
            assert payloads[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            for index in range(n):
                of_it = [choice for one in payloads for choice in one["choices"] if choice["index"] == index]
                text = "".join(choice["text"] for choice in of_it)
                scores: dict[str, list[Any]] = {}
                for choice in of_it:
                    for name, values in choice["logprobs"].items():
                        scores.setdefault(name, []).extend(values)
                assert text.startswith(prompt)
                assert {len(values) for values in scores.values()} == {tokens + 3}
                assert scores["token_logprobs"][0] is None
                assert scores["top_logprobs"][0] is None
                assert all(logprob <= 0 for logprob in scores["token_logprobs"][1:])
                for offset, token, top in list(
                    zip(scores["text_offset"], scores["tokens"], scores["top_logprobs"], strict=True)
                )[1:]:
                    assert token in top
                    assert token.startswith("bytes:") or text[offset:].startswith(token)

    run(work)


def test_scores_of_the_prompt_of_token_ids_of_one_token(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            (choice,) = (await server.complete(prompt=[33], echo=True, logprobs=1, max_tokens=1))["choices"]
            assert choice["text"][0] == choice["logprobs"]["tokens"][0] == "A"
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["text_offset"] == [0, 1]

    run(work)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", "at least 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": True}, "n", "got `bool`"),
        ({"n": 3, "best_of": 2}, "best_of", "at least 3"),
        ({"n": 9}, "n", "at most 8 requests run at once"),
        ({"best_of": 9}, "best_of", "--max-num-seqs"),
        ({"n": 8, "max_tokens": 200}, "n", "the pool has 64"),
        ({"use_beam_search": True, "best_of": 8, "max_tokens": 200}, "best_of", "the pool has 64"),
        ({"stream": True, "best_of": 2}, "stream", "best_of 2 above n 1"),
        ({"stream": True, "use_beam_search": True}, "stream", "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty", "beam search"),
        ({"early_stopping": True}, "early_stopping", "beam search"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", "'soon'"),
        ({"use_beam_search": True, "length_penalty": 99}, "length_penalty", "at most 5"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "beam search"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "beam search"),
        ({"use_beam_search": 1}, "use_beam_search", "expected `bool"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_be_had_is_named(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            prompt = CHAT if path.endswith("chat/completions") else {"prompt": PROMPT}
            answer = await server.post(path, {**prompt, "max_tokens": 4, **fields})
            error = answer.json()["error"]
            assert answer.status_code == 400, answer.text
            assert (error["param"], error["code"]) == (param, "invalid_value"), error
            assert words in error["message"]

    run(work)


def test_branches_of_one_http_request_are_bounded(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer, config=ServerConfig(max_branches=6)) as server:
            assert len((await server.complete(prompt=["a", "b"], n=3, max_tokens=1))["choices"]) == 6
            answer = await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 4})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
            assert "2 prompts x n 4 = 8 branches" in answer.json()["error"]["message"]
            assert len((await server.complete(prompt=list("abcdefgh"), max_tokens=1))["choices"]) == 8

    run(work)


def test_status_and_metrics_tell_what_branches_saved(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            before = await server.kv()
            assert (before["branch_saved_blocks"], before["branch_peak_saved_blocks"]) == (0, 0)
            answer = await server.complete(prompt="x" * 100, max_tokens=4, n=3, seed=1)
            after = await server.kv()
            assert after["branch_saved_blocks"] == 0
            assert after["branch_peak_saved_blocks"] == answer["usage"]["octavo"]["branch_peak_saved_blocks"] >= 12
            assert after["copied_blocks"] >= 2
            metrics = (await server.http.get("/metrics")).text
            line = (
                f'octavo_kv_branch_peak_saved_blocks{{model_name="tiny/bytes"}} {after["branch_peak_saved_blocks"]}.0'
            )
            assert line in metrics

    run(work)
