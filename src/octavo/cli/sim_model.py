"""`octavo serve --executor sim`: an engine with the timing of a machine that is not here, made of a model's sizes.

It joins config, cost model, core and a stand-in for the model; weights are never read.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.cli.loading import ModelFlags, OpenModel, read_template
from octavo.cli.replay_allocators import kv_bytes
from octavo.core.block_manager import BlockManager
from octavo.core.engine_core import EngineCore
from octavo.core.kv_groups import format_words, with_formats
from octavo.core.scheduler import Scheduler
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from octavo.executor.kv_setting import KVSetting
from octavo.executor.layer_formats import skipped_formats
from octavo.executor.memory_plan import MemoryAccount, MemoryPlan
from octavo.executor.plan import CachePlan
from octavo.llm import LoadedModel
from octavo.replay.cost_fit import read_cost
from octavo.replay.cost_model import roofline
from octavo.replay.hardware import find_hardware
from octavo.replay.model_shape import shape_of
from octavo.replay.sim_serving import PacedExecutor

if TYPE_CHECKING:
    from pathlib import Path

LETTERS = "etaoin shrdlu"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def open_simulated(model: str | None, flags: ModelFlags, values: dict[str, Any]) -> OpenModel:
    """model: whose tokenizer to use; None: a token for each byte. Raises ConfigError, each with its cure."""
    if values["config"] is None:
        raise ConfigError("--executor sim needs --config: a config.json of the model to pretend, or a known name")
    if values["hardware"] is None and values["cost"] is None:
        raise ConfigError("--executor sim needs --hardware, or --cost with a file of `octavo calibrate-cost`")
    shape = shape_of(values["config"])
    kv_format = "bf16" if flags.executor.kv_cache_dtype == "auto" else flags.executor.kv_cache_dtype
    skipped = skipped_formats(flags.executor, "bf16", shape.num_layers)
    spec = shape.kv_spec(flags.executor.block_size, kv_format)
    spec = replace(spec, groups=with_formats(spec.groups, skipped))
    hardware = find_hardware(values["hardware"] or "H100")
    token_bytes = spec.bytes_per_token
    sizes = {"kv_cache_memory": flags.executor.kv_cache_memory, "cache_blocks": None, "block_size": spec.block_size}
    num_blocks = spec.num_blocks(kv_bytes(sizes, shape, hardware, token_bytes))
    cost = read_cost(values["cost"]) if values["cost"] is not None else roofline(shape, hardware, token_bytes)
    tokenizer, template = _texts(model, values["chat_template"])
    scheduler = replace(flags.scheduler, max_model_len=flags.max_model_len or shape.max_positions)
    blocks = BlockManager(spec, num_blocks, enable_prefix_caching=scheduler.enable_prefix_caching)
    drawn = [token for letter in LETTERS for token in tokenizer.encode(letter, False)]
    executor = PacedExecutor(cost, sorted(set(drawn)), time.monotonic, time.sleep)
    vocab_size = max(shape.vocab_size, tokenizer.vocab_size)
    simulated = (f"answers are simulated: {cost.name}",)
    plan = CachePlan(spec, num_blocks, scheduler.max_model_len, degraded=simulated)
    loaded = LoadedModel(
        core=EngineCore(Scheduler(scheduler, blocks, vocab_size=vocab_size), executor),
        tokenizer=tokenizer,
        chat_template=template,
        chat_error=None,
        name=shape.name,
        digest="",
        vocab_size=vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        default_sampling={},
        plan=plan,
        weights_dtype="bf16",
        kv_cache_dtype=format_words(spec.groups),
        instruction_set=f"simulated {hardware.name}" if values["cost"] is None else "simulated",
        num_threads=0,
        scheduler_config=scheduler,
        memory=_nothing(),
        kv_setting=KVSetting(kv_format),
    )
    return OpenModel(shape.name, loaded)


def _nothing() -> MemoryAccount:
    """Weights and cache are pretended: no memory is planned for them, and none is taken."""
    return MemoryAccount(
        MemoryPlan(base_bytes=0, file_bytes=0, weights_bytes=0, kv_bytes=0, working_bytes=0, loading_bytes=0), 0, 0
    )


def _texts(model: str | None, template: Path | None) -> tuple[Tokenizer, ChatTemplate]:
    if model is not None:
        from octavo.cli.tokenizer_only import tokenizer_of

        tokenizer = tokenizer_of(model)
    else:
        tokenizer = byte_tokenizer()
    return tokenizer, ChatTemplate(read_template(template) or TEMPLATE, tokenizer.special_tokens)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte of UTF-8, and an end token that is never drawn."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(other)}
    never = letters[0xFF]  # a vocabulary must have a merge; no text has this byte
    tokens = [*(letters[byte] for byte in range(256)), never + never, "<|end|>"]
    return Tokenizer.from_gguf_metadata(
        {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [*[1] * 257, 3],
            "tokenizer.ggml.merges": [f"{never} {never}"],
            "tokenizer.ggml.eos_token_id": 257,
        }
    )
