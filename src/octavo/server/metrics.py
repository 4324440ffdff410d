"""GET /metrics: the engine's status in Prometheus' text form, under the names that dashboards of this field read.

Nothing is counted here: each scrape shows one status, so a figure cannot disagree with the ledger. It does not know who
scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octavo.engine.histogram import HistogramSnapshot
from octavo.engine.status import EngineStatus
from octavo.server.context import Call, ServerContext
from octavo.server.reply import Reply, TextReply
from octavo.server.served_model import ServedModel


async def metrics(context: ServerContext, _call: Call) -> Reply:
    registry = CollectorRegistry()
    registry.register(StatusCollector(await context.engine.status(), context.model))
    return TextReply(generate_latest(registry), CONTENT_TYPE_LATEST)


class StatusCollector:
    """One status as metric families. `describe` is empty, so registering it does not collect."""

    def __init__(self, status: EngineStatus, model: ServedModel) -> None:
        self._status = status
        self._model = model

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()

    def _gauges(self) -> Iterable[Metric]:
        core = self._status.core
        held = core.used_blocks / core.num_blocks if core.num_blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Requests that run now.", core.running),
            ("vllm:num_requests_waiting", "Requests that wait to run.", core.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks that running requests hold (1: all).", held),
            ("octavo_kv_blocks", "KV blocks of the pool.", core.num_blocks),
            ("octavo_kv_blocks_free", "KV blocks that hold nothing.", core.free_blocks),
            ("octavo_kv_blocks_cached", "KV blocks kept for later requests only.", core.cached_blocks),
            ("octavo_kv_blocks_used", "KV blocks that running requests hold.", core.used_blocks),
            ("octavo_kv_branch_saved_blocks", "KV blocks saved now by branches that share.", core.branch_saved_blocks),
            (
                "octavo_kv_branch_peak_saved_blocks",
                "Most KV blocks that branches saved at once so far.",
                core.branch_peak_saved_blocks,
            ),
            (
                "octavo_kv_internal_waste_tokens",
                "Slots of held blocks that are not filled.",
                core.internal_waste_tokens,
            ),
            ("octavo_engine_up", "1 while the engine takes requests.", int(self._status.state == "running")),
        )
        for name, text, value in gauges:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model.name], float(value))
            yield family
        groups = GaugeMetricFamily(
            "octavo_kv_group_blocks", "KV blocks by group of layers and use.", labels=["model_name", "group", "use"]
        )
        for spec, blocks in zip(core.kv_groups, core.kv_group_blocks, strict=True):
            groups.add_metric([self._model.name, spec.name, "used"], float(blocks.used))
            groups.add_metric([self._model.name, spec.name, "cached"], float(blocks.cached))
        yield groups

    def _counters(self) -> Iterable[Metric]:
        core = self._status.core
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache, once a request.", core.queries_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens that the cache answered, once a request.", core.hit_tokens),
            ("vllm:num_preemptions", "Times a running request gave its blocks back.", core.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests, once a request.", core.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", core.generation_tokens),
            ("octavo_computed_tokens", "Token positions computed for the first time.", core.computed_tokens),
            ("octavo_recomputed_tokens", "Token positions computed again.", core.recomputed_tokens),
            (
                "octavo_restored_tokens",
                "Token positions found again in the cache after a preemption.",
                core.restored_tokens,
            ),
            ("octavo_processed_tokens", "Rows that the kernels really processed.", core.processed_tokens),
            ("octavo_steps", "Engine steps.", core.steps),
            ("octavo_evicted_blocks", "Cached KV blocks given up for new ones.", core.evicted_blocks),
            ("octavo_passed_blocks", "KV blocks that requests gave up behind an attention window.", core.passed_blocks),
            ("octavo_dropped_tokens", "Tokens that requests did not keep, by their policy.", core.dropped_tokens),
            ("octavo_copied_blocks", "KV blocks copied in part.", core.copies),
            ("octavo_requests_refused", "Requests that were never admitted.", self._status.refused),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model.name], float(value))
            yield family
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", labels=["model_name", "source"]
        )
        sources.add_metric([self._model.name, "local_compute"], float(core.prompt_tokens - core.hit_tokens))
        sources.add_metric([self._model.name, "local_cache_hit"], float(core.hit_tokens))
        yield sources
        finished = CounterMetricFamily(
            "vllm:request_success", "Final answers by their reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._status.finished:
            finished.add_metric([self._model.name, reason], float(count))
        yield finished

    def _histograms(self) -> Iterable[Metric]:
        status = self._status
        histograms = (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", status.time_to_first_token_s),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", status.inter_token_latency_s),
            ("vllm:e2e_request_latency_seconds", "From arrival to the final answer.", status.e2e_request_latency_s),
        )
        for name, text, snapshot in histograms:
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model.name], _buckets(snapshot), snapshot.total)
            yield family

    def _cache_config(self) -> Metric:
        core = self._status.core
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's configuration; the value is always 1.",
            labels=[
                "model_name",
                "block_size",
                "num_gpu_blocks",
                "cache_dtype",
                "enable_prefix_caching",
            ],
        )
        blocks = str(core.num_blocks)
        model = self._model
        caching = str(model.enable_prefix_caching)
        family.add_metric([model.name, str(core.block_size), blocks, model.kv_cache_dtype, caching], 1.0)
        return family


def _buckets(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*snapshot.bounds, float("inf")), snapshot.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(below)))
    return buckets
