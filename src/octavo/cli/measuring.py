"""Measures short runs of a model for the walks: seconds of prefill and decode, with the cache and without it.

Times are of this machine as it is now; nothing is asserted of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LoadedModel
    from octavo.planner.walks.numbers import Measurements

KV_BYTES = 256 << 20
PROMPT_TOKENS = (32, 128, 512)
NEW_TOKENS = (8, 16, 32)
SHORT_PROMPT = 32


def load_small(model: str, *, enable_kv_cache: bool = True) -> LoadedModel:
    """The model with a small pool. Raises OctavoError, each with its cure."""
    from octavo.cli.model_cache import resolve_model
    from octavo.core.config import SchedulerOptions
    from octavo.executor.config import ExecutorConfig
    from octavo.llm import load

    scheduler = SchedulerOptions(enable_prefix_caching=True, enable_kv_cache=enable_kv_cache)
    return load(str(resolve_model(model)), scheduler=scheduler, executor=ExecutorConfig(kv_cache_memory=KV_BYTES))


def measure_phases(model: str) -> Measurements:
    """Prompts of several lengths, each with one new token; then decode steps, alone and eight at once."""
    from octavo.planner.walks.numbers import Measured, Measurements

    loaded = load_small(model)
    _run(loaded, SHORT_PROMPT, 2, offset=5000)  # what happens once: pages, threads
    runs = []
    for length in PROMPT_TOKENS:
        seconds, _ = _run(loaded, length, 1, offset=length)
        runs.append(Measured("prefill", length, seconds))
    for batch in (1, 8):
        short, _ = _run(loaded, SHORT_PROMPT, 1, offset=3000 + batch, batch=batch)
        long, _ = _run(loaded, SHORT_PROMPT, 33, offset=4000 + batch, batch=batch)
        runs.append(Measured(f"decode, batch {batch}", 32 * batch, max(long - short, 1e-9)))
    return Measurements(_machine(loaded), tuple(runs))


def measure_recompute(model: str) -> Measurements:
    """The same texts with the cache, and with every token computed from the whole text again."""
    from octavo.planner.walks.numbers import Measured, Measurements

    cached, uncached = load_small(model), load_small(model, enable_kv_cache=False)
    for loaded in (cached, uncached):
        _run(loaded, SHORT_PROMPT, 2, offset=5000)  # what happens once: pages, threads
    runs = []
    for count in NEW_TOKENS:
        with_s, ours = _run(cached, SHORT_PROMPT, count, offset=count)
        without_s, theirs = _run(uncached, SHORT_PROMPT, count, offset=count)
        assert ours == theirs, "the cache changed an answer"
        runs.append(Measured("text", count, with_s, without_s))
    return Measurements(_machine(cached), tuple(runs))


def _run(loaded: LoadedModel, length: int, new_tokens: int, *, offset: int, batch: int = 1) -> tuple[float, list[int]]:
    """Seconds, and the tokens drawn, of prompts that nothing in the cache begins like."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    core, usable = loaded.core, loaded.vocab_size - 10
    for index in range(batch):
        prompt = [(7 + 31 * offset + 17 * index + 13 * place) % usable for place in range(length)]
        core.add(Request(f"measured-{offset}-{index}", prompt, params, seed=index))
    drawn: list[int] = []
    started = time.perf_counter()
    while core.has_work:
        drawn += [output.token.token_id for output in core.step() if output.token is not None]
    return time.perf_counter() - started, drawn


def _machine(loaded: LoadedModel) -> str:
    threads = f"{loaded.num_threads} thread{'s' if loaded.num_threads != 1 else ''}"
    return f"this machine ({loaded.instruction_set}, {threads}, {loaded.weights_dtype} weights)"
