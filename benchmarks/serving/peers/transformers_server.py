"""An OpenAI /v1/completions endpoint around transformers' generate, for the comparison only.

Requests that wait together run as one batch, padded on the left, in bf16 with PyTorch's attention. Run it with an
interpreter that has transformers, torch, starlette and uvicorn: python transformers_server.py MODEL_DIRECTORY PORT
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

MAX_BATCH = 32


@dataclass(slots=True)
class Waiting:
    ids: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[int | None]

    def send(self, value: int | None) -> None:
        self.loop.call_soon_threadsafe(self.out.put_nowait, value)


class Columns(BaseStreamer):
    """Hands each row of a batch its token of a step, until the row has as many as it wants."""

    def __init__(self, batch: list[Waiting]) -> None:
        self.batch = batch
        self.num_sent = [0] * len(batch)
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        for row, (one, token) in enumerate(zip(self.batch, value.tolist(), strict=True)):
            if self.num_sent[row] < one.max_tokens:
                self.num_sent[row] += 1
                one.send(token)
                if self.num_sent[row] == one.max_tokens:
                    one.send(None)

    def end(self) -> None:
        pass


class Engine:
    """One thread runs the model."""

    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        self.arrivals: queue.Queue[Waiting] = queue.Queue()
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self) -> None:
        while True:
            batch = [self.arrivals.get()]
            while len(batch) < MAX_BATCH and not self.arrivals.empty():
                batch.append(self.arrivals.get())
            self.run(batch)

    def run(self, batch: list[Waiting]) -> None:
        longest = max(len(one.ids) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.ids)) + one.ids for one in batch])
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch])
        tokens = max(one.max_tokens for one in batch)
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=Columns(batch),
            )


def make_app(engine: Engine) -> Starlette:
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        ids = engine.tokenizer(body["prompt"]).input_ids
        out: asyncio.Queue[int | None] = asyncio.Queue()
        engine.arrivals.put(Waiting(ids, body["max_tokens"], asyncio.get_running_loop(), out))

        async def events() -> AsyncIterator[str]:
            count = 0
            while (token := await out.get()) is not None:
                count += 1
                text = engine.tokenizer.decode([token])
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
            usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


if __name__ == "__main__":
    uvicorn.run(make_app(Engine(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
