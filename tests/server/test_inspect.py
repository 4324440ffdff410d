"""Models, health, KV status and reset, metrics, tokens and text."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.core.cache_curve import CacheCurve, CurveEstimate
from octavo.engine.tokenizer import Tokenizer
from octavo.testing.fake_clock import FakeClock
from tests.engine.engine_case import FailingExecutor, SayingExecutor, checking_executor, tokens_of
from tests.server.http_case import MODEL, Served, run, served

STATUS_KEYS = {
    "num_blocks", "block_size", "kv_bytes_per_block", "free_blocks", "cached_blocks", "used_blocks",
    "internal_waste_tokens", "kv_groups", "queries_tokens", "hit_tokens", "preemptions",
    "running", "waiting", "degraded",
}  # fmt: skip


def test_models(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            listed = (await server.http.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == [MODEL, "alias"]
            card = (await server.http.get(f"/v1/models/{MODEL}")).json()
            assert card == listed["data"][0]
            assert (card["object"], card["max_model_len"], card["owned_by"]) == ("model", 256, "octavo")
            assert card["octavo"]["default_sampling"] == {"temperature": 1.0}
            answer = await server.http.get("/v1/models/other")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"

    run(work)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_another_model_is_404_with_the_names_that_there_are(tokenizer: Tokenizer, path: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post(path, {"model": "gpt-4"})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "'gpt-4'" in error["message"]
            assert "'tiny/bytes', 'alias'" in error["message"]

    run(work)


def test_no_such_path_or_method(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for method, path, status in [
                ("GET", "/v2", 404),
                ("GET", "/v1/completions", 405),
                ("POST", "/health", 405),
            ]:
                answer = await server.http.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["code"] == "unknown_endpoint"
                assert "POST /v1/completions" in answer.json()["error"]["message"]

    run(work)


def test_version(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            assert list((await server.http.get("/version")).json()) == ["version"]

    run(work)


def test_kv_status_has_every_key_and_balances(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            await server.complete(prompt="x" * 100, max_tokens=3)
            status = await server.kv()
            assert set(status) >= STATUS_KEYS
            assert status["free_blocks"] + status["cached_blocks"] + status["used_blocks"] == status["num_blocks"] == 64
            assert status["queries_tokens"] == 100
            assert status["degraded"] == ["a reason"]
            (group,) = status["kv_groups"]
            assert group["kv_format"] == "f32"
            assert group["bytes_per_token"] * status["block_size"] == status["kv_bytes_per_block"]

    run(work)


def test_the_curve_is_what_the_engines_source_says(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.http.get("/v1/kv/mrc")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_curve")
            curve = CacheCurve(
                64, 16, 1024, 10, 4, 0.4, (CurveEstimate(0.5, 32, 0.3), CurveEstimate(1.0, 64, 0.4)), 1.0, 7
            )
            server.engine._loop._curve = lambda: curve
            found = (await server.http.get("/v1/kv/mrc")).json()
            assert (found["num_blocks"], found["hit_rate"], found["ghost_blocks"]) == (64, 0.4, 7)
            assert found["curve"][0] == {"scale": 0.5, "blocks": 32, "bytes": 32 * 1024, "hit_rate": 0.3}

    run(work)


def test_kv_reset_makes_the_next_request_cold(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            for expected in (0, 96):
                usage = (await server.complete(prompt="x" * 100, max_tokens=1))["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= expected
            cached = (await server.kv())["cached_blocks"]
            answer = await server.post("/v1/kv/reset", {})
            assert answer.json() == {"dropped_blocks": cached}
            assert (await server.http.post("/v1/kv/reset")).json() == {"dropped_blocks": 0}
            usage = (await server.complete(prompt="x" * 100, max_tokens=1))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    run(work)


def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = (await server.post("/tokenize", {"prompt": "Grüße", "model": "alias"})).json()
            assert answer == {"count": 7, "max_model_len": 256, "tokens": tokens_of("Grüße")}
            back = (await server.post("/detokenize", {"tokens": answer["tokens"]})).json()
            assert back == {"prompt": "Grüße"}
            special = (await server.post("/tokenize", {"prompt": "a<|end|>"})).json()["tokens"]
            assert (await server.post("/detokenize", {"tokens": special})).json() == {"prompt": "a<|end|>"}

    run(work)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
    ],
)
def test_wrong_tokenize_calls(tokenizer: Tokenizer, path: str, body: Any, param: str) -> None:
    async def work() -> None:
        async with served(tokenizer) as server:
            answer = await server.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(work)


async def scrape(server: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = await server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items()) - {("model_name", MODEL)}): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_have_the_names_that_dashboards_read_and_agree_with_the_requests(tokenizer: Tokenizer) -> None:
    none: frozenset[tuple[str, str]] = frozenset()

    async def work() -> None:
        async with served(tokenizer, SayingExecutor()) as server:
            usages = [(await server.complete(prompt="x" * 100, max_tokens=5))["usage"] for _ in range(3)]
            usages.append((await server.complete(prompt="y", max_tokens=64))["usage"])
            prompt = sum(usage["prompt_tokens"] for usage in usages)
            cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
            output = sum(usage["completion_tokens"] for usage in usages)
            assert cached > 0
            found = await scrape(server)
            assert found["vllm:prompt_tokens_total", none] == prompt
            assert found["vllm:generation_tokens_total", none] == output
            assert found["vllm:prefix_cache_queries_total", none] == prompt
            assert found["vllm:prefix_cache_hits_total", none] == cached
            sources = {
                source: found["vllm:prompt_tokens_by_source_total", frozenset({("source", source)})]
                for source in ("local_compute", "local_cache_hit")
            }
            assert sources == {"local_compute": prompt - cached, "local_cache_hit": cached}
            assert found["octavo_processed_tokens_total", none] == prompt - cached + output - len(usages)
            assert found["vllm:num_preemptions_total", none] == 0
            assert (found["vllm:num_requests_running", none], found["vllm:num_requests_waiting", none]) == (0, 0)
            assert found["vllm:kv_cache_usage_perc", none] == 0
            assert found["vllm:time_to_first_token_seconds_count", none] == 4
            assert found["vllm:e2e_request_latency_seconds_count", none] == 4
            assert found["vllm:inter_token_latency_seconds_count", none] == output - 4
            assert found["vllm:request_success_total", frozenset({("finished_reason", "length")})] == 3
            assert found["vllm:request_success_total", frozenset({("finished_reason", "stop")})] == 1
            assert found["octavo_kv_blocks", none] == 64
            info = next(dict(labels) for name, labels in found if name == "vllm:cache_config_info")
            assert (info["block_size"], info["cache_dtype"]) == ("16", "f32")

    run(work)


def test_counters_count_a_preempted_request_once(tokenizer: Tokenizer) -> None:
    """F17: what is computed or hit again after a preemption is no new query, hit or prompt token."""
    none: frozenset[tuple[str, str]] = frozenset()

    async def work() -> None:
        async with served(tokenizer, num_blocks=8) as server:
            body = {"prompt": ["a" * 30, "b" * 30, "c" * 30], "max_tokens": 60}
            usage = (await server.complete(**body))["usage"]
            found = await scrape(server)
            assert found["vllm:num_preemptions_total", none] > 0
            assert found["vllm:prompt_tokens_total", none] == usage["prompt_tokens"] == 90
            assert found["vllm:prefix_cache_queries_total", none] == 90
            assert found["vllm:prefix_cache_hits_total", none] == usage["prompt_tokens_details"]["cached_tokens"]
            assert found["vllm:generation_tokens_total", none] == usage["completion_tokens"] == 180
            computed, again = found["octavo_computed_tokens_total", none], found["octavo_recomputed_tokens_total", none]
            assert found["octavo_processed_tokens_total", none] == computed + again
            assert again > 0

    run(work)


def test_histograms_hold_what_the_clock_says() -> None:
    from octavo.engine.histogram import Histogram
    from octavo.server.metrics import _buckets

    clock = FakeClock()
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        clock.advance(seconds)
        histogram.observe(seconds)
    assert _buckets(histogram.snapshot()) == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert histogram.snapshot().total == pytest.approx(clock.now())


def test_health_tells_a_failed_engine(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        executor = FailingExecutor(checking_executor(), fails_in_step=1)
        async with served(tokenizer, executor) as server:
            assert (await server.http.get("/health")).json() == {"status": "ok"}
            answer = await server.post("/v1/completions", {"prompt": "x"})
            assert answer.status_code == 500
            assert "on fire" in answer.json()["error"]["message"]
            health = await server.http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "failed"
            assert "on fire" in health.json()["reason"]
            later = await server.post("/v1/completions", {"prompt": "x"})
            assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_stopped")
            kv = await server.kv()
            assert (kv["state"], kv["running"], kv["waiting"], kv["used_blocks"]) == ("failed", 0, 0, 0)
            assert (await scrape(server))["octavo_engine_up", frozenset()] == 0

    run(work)
    assert "on fire" in caplog.text
