"""What a server says when it starts: what is loaded and how, what is not as asked, and how to try it.

It does not know how a server runs.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from octavo.cli.units import format_bytes

if TYPE_CHECKING:
    from octavo.cli.loading import OpenModel
    from octavo.executor.memory_plan import MemoryAccount

TRIED_MESSAGE = "Why is the sky blue?"
TRIED_TOKENS = 64


def boot_lines(opened: OpenModel) -> list[str]:
    """The model and the plan of its memory."""
    loaded = opened.loaded
    threads = f"{loaded.num_threads} thread{'s' if loaded.num_threads != 1 else ''}"
    lines = [
        f"octavo: {opened.name}, weights {loaded.weights_dtype} ({format_bytes(loaded.weights_bytes)}), "
        f"KV cache {loaded.kv_cache_dtype}{loaded.kv_setting.words()}, {loaded.instruction_set}, {threads}",
        str(loaded.plan),
    ]
    if not loaded.scheduler_config.enable_kv_cache:
        lines.append("--no-kv-cache: every token is computed from the whole text again; for measurements only")
    elif not loaded.scheduler_config.enable_prefix_caching:
        lines.append("--no-enable-prefix-caching: requests share nothing")
    return [*lines, *(f"degraded: {text}" for text in loaded.degraded)]


def plan_line(memory: MemoryAccount) -> str:
    """The plan of the whole process, and whether what was allocated is what was planned."""
    plan = memory.plan
    held = "; ".join(memory.differences()) or "allocated as planned"
    return (
        f"memory: {plan.weights_bytes} bytes of weights + {plan.kv_bytes} of KV cache, {held}; at most "
        f"{plan.peak_bytes} resident ({format_bytes(plan.peak_bytes)})"
    )


def ready_lines(url: str, model_name: str, *, is_chat: bool, needs_key: bool) -> list[str]:
    """The last lines before the first request."""
    key = ", with one of the keys for KEY" if needs_key else ""
    curl = curl_line(url, model_name, is_chat=is_chat, needs_key=needs_key)
    return [f"ready: {url}/v1 serves {model_name}; try{key}", curl]


def curl_line(url: str, model_name: str, *, is_chat: bool, needs_key: bool) -> str:
    """A request that answers, to be pasted into a shell."""
    body: dict[str, object] = {"model": model_name}
    if is_chat:
        body["messages"] = [{"role": "user", "content": TRIED_MESSAGE}]
    else:
        body["prompt"] = TRIED_MESSAGE
    body["max_tokens"] = TRIED_TOKENS
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    path = "chat/completions" if is_chat else "completions"
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {data}"
