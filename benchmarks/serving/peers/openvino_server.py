"""An OpenAI /v1/completions endpoint around OpenVINO GenAI's continuous batching pipeline, for the comparison only.

Run it with an interpreter that has openvino-genai, starlette and uvicorn: python openvino_server.py MODEL.gguf PORT
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route


class Engine:
    """One thread owns the pipeline and steps it; tokens go to asyncio queues."""

    def __init__(self, path: str) -> None:
        settings = genai.SchedulerConfig()
        settings.enable_prefix_caching = True
        settings.cache_size = 2
        settings.max_num_seqs = 64
        settings.max_num_batched_tokens = 512
        self.pipeline = genai.ContinuousBatchingPipeline(path, settings, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.arrivals: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.next_id = 0
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self) -> None:
        open_requests: dict[int, tuple[Any, ...]] = {}
        while True:
            while not self.arrivals.empty() or not open_requests:
                tokens, config, loop, out = self.arrivals.get()
                self.next_id += 1
                open_requests[self.next_id] = (self.pipeline.add_request(self.next_id, tokens, config), loop, out)
            self.pipeline.step()
            for key, (handle, loop, out) in list(open_requests.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        loop.call_soon_threadsafe(out.put_nowait, list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    loop.call_soon_threadsafe(out.put_nowait, None)
                    del open_requests[key]


def make_app(engine: Engine) -> Starlette:
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        tokens = engine.tokenizer.encode(body["prompt"], add_special_tokens=True).input_ids
        config = genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        out: asyncio.Queue[list[int] | None] = asyncio.Queue()
        engine.arrivals.put((tokens, config, asyncio.get_running_loop(), out))

        async def events() -> AsyncIterator[str]:
            count = 0
            while (ids := await out.get()) is not None:
                count += len(ids)
                text = engine.tokenizer.decode(ids)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
            usage = {
                "prompt_tokens": tokens.shape[1],
                "completion_tokens": count,
                "total_tokens": tokens.shape[1] + count,
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


if __name__ == "__main__":
    uvicorn.run(make_app(Engine(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
