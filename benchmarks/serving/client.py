"""Drive an OpenAI-compatible /v1/completions server with the workloads; print one JSON line a workload.

python client.py URL MODEL [WORKLOAD ...] [JSON of extra request fields]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx
from workloads import build


async def one(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one streamed request; times in seconds."""
    start = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] | None = None
    chunks = 0
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code} {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise SystemExit(f"error in the stream: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                chunks += 1
                first = first or time.perf_counter() - start
    if first is None:
        raise SystemExit("a stream ended without a token")
    usage = usage or {
        "prompt_tokens": 0,
        "completion_tokens": chunks,
    }
    return {"ttft": first, "total": time.perf_counter() - start, "usage": usage}


async def run(url: str, model: str, names: list[str], extra: dict[str, Any]) -> None:
    workloads = build()
    limits = httpx.Limits(max_keepalive_connections=0, max_connections=256)
    async with httpx.AsyncClient(timeout=900, limits=limits) as client:

        def send(request: dict[str, Any]) -> Any:
            stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
            return one(client, url, {"model": model, **request, **stream, **extra})

        await send({"prompt": "Hello there", "max_tokens": 8})
        for name in names or workloads:
            results: list[dict[str, Any]] = []
            start = time.perf_counter()
            for wave in workloads[name]:
                results += await asyncio.gather(*(send(request) for request in wave))
            seconds = time.perf_counter() - start
            print(json.dumps(summary(name, seconds, results)), flush=True)


def summary(name: str, seconds: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    output = sum(r["usage"]["completion_tokens"] for r in results)
    cached = sum((r["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for r in results)
    ttft = sorted(r["ttft"] for r in results)
    return {
        "workload": name,
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(r["usage"]["prompt_tokens"] for r in results),
        "output_tokens": output,
        "out_tok_s": round(output / seconds, 1),
        "ttft_p50": round(ttft[len(ttft) // 2], 3),
        "ttft_max": round(ttft[-1], 3),
        "cached_tokens": cached,
    }


if __name__ == "__main__":
    arguments = sys.argv[3:]
    fields = next((json.loads(a) for a in arguments if a.startswith("{")), {"ignore_eos": True})
    asyncio.run(run(sys.argv[1], sys.argv[2], [a for a in arguments if not a.startswith("{")], fields))
