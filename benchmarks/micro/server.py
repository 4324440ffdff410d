"""What the engine and the server cost beside the model: streamed tokens per second with an executor that does nothing.

One process serves on a socket, another reads, as in life:

    PYTHONPATH=. python benchmarks/micro/server.py [--streams 32] [--tokens 256] [--step-ms 5]

prints one JSON line per layer: the core alone, the asynchronous engine, and HTTP with server-sent events. Without
--step-ms the steps take no time: the engine's thread then outruns the readers, who get many tokens in one event. With
it each step sleeps as long as a kernel would work; `ideal_tokens_per_s` is what nothing but the sleep would allow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import SampledToken, StepPlan, StepResult
from octavo.engine.outputs import GenerationRequest
from octavo.server.config import ServerConfig
from octavo.server.run import serve
from tests.engine.engine_case import new_core, new_engine, tiny_tokenizer
from tests.server.http_case import model_info

LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 2048, "num_blocks": 40_000}


class NullExecutor:
    """Draws the letter x for every row, after a while without the GIL."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        token = SampledToken(ord("x") - 32)
        return StepResult(
            {row.request_id: token for row in plan.rows if row.sample is not None}, num_tokens=plan.num_tokens
        )


def measure_core(streams: int, tokens: int, step_s: float) -> float:
    core = new_core(NullExecutor(step_s), **LIMITS)
    for index in range(streams):
        core.add(Request(f"{index}", [index % 90] * 32, SamplingParams(max_tokens=tokens), seed=index))
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return time.perf_counter() - start


def measure_engine(streams: int, tokens: int, step_s: float, directory: Path) -> float:
    engine = new_engine(tiny_tokenizer(directory), NullExecutor(step_s), **LIMITS)

    async def one(index: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        generation = await engine.submit([GenerationRequest(f"{index}", [index % 90] * 32, params)])
        while not generation.finished:
            await generation.take()

    async def main() -> float:
        engine.start()
        start = time.perf_counter()
        await asyncio.gather(*(one(index) for index in range(streams)))
        seconds = time.perf_counter() - start
        await engine.shutdown(0)
        return seconds

    return asyncio.run(main())


def run_server(directory: str, step_s: float, addresses: multiprocessing.Queue[str]) -> None:
    engine = new_engine(tiny_tokenizer(Path(directory)), NullExecutor(step_s), **LIMITS)
    serve(engine, model_info(max_model_len=2048), ServerConfig(port=0), on_ready=addresses.put)


@contextmanager
def served(step_s: float, directory: Path) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    addresses: multiprocessing.Queue[str] = context.Queue()
    process = context.Process(target=run_server, args=(str(directory), step_s, addresses))
    process.start()
    try:
        yield addresses.get(timeout=60)
    finally:
        process.terminate()
        process.join()


async def read_stream(host: str, port: int, tokens: int, index: int) -> tuple[int, float]:
    """A client that costs little: it counts events and does not read them. Returns events, seconds to the first."""
    body = json.dumps({"prompt": [index % 90] * 32, "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    start = time.perf_counter()
    writer.write(head.encode() + body)
    events, first = 0, 0.0
    while chunk := await reader.read(65536):
        found = chunk.count(b"data: ")
        first = first or (time.perf_counter() - start if found else 0.0)
        events += found
    writer.close()
    return events, first


def measure_http(streams: int, tokens: int, step_s: float, directory: Path) -> dict[str, float]:
    async def main(host: str, port: int) -> dict[str, float]:
        await read_stream(host, port, 4, 0)
        start = time.perf_counter()
        results = await asyncio.gather(*(read_stream(host, port, tokens, index) for index in range(streams)))
        seconds = time.perf_counter() - start
        events = sum(count for count, _ in results)
        return {"seconds": seconds, "events": events, "first_s": max(first for _, first in results)}

    with served(step_s, directory) as address:
        host, port = address.removeprefix("http://").split(":")
        return asyncio.run(main(host, int(port)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--streams", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--step-ms", type=float, default=0.0)
    given = arguments.parse_args()
    step_s = given.step_ms / 1000
    total = given.streams * given.tokens
    common = {"streams": given.streams, "tokens": given.tokens, "cores": len(os.sched_getaffinity(0))}
    if step_s:
        common["ideal_tokens_per_s"] = round(given.streams / step_s)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        core = measure_core(given.streams, given.tokens, step_s)
        engine = measure_engine(given.streams, given.tokens, step_s, path)
        http = measure_http(given.streams, given.tokens, step_s, path)
    print(json.dumps({"layer": "core", "tokens_per_s": round(total / core), **common}))
    print(json.dumps({"layer": "async engine", "tokens_per_s": round(total / engine), **common}))
    rate = {
        "tokens_per_s": round(total / http["seconds"]),
        "events": http["events"],
        "first_s": round(http["first_s"], 4),
    }
    print(json.dumps({"layer": "http", **rate, **common}))


if __name__ == "__main__":
    main()
