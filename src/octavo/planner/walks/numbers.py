"""The walks that are made of arithmetic: phases, recompute, memory and compression. Numbers come from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.planner.chart import Chart, Series
from octavo.planner.comparisons import Comparisons
from octavo.planner.figures import group_formula
from octavo.planner.plan import Plan
from octavo.planner.plots import by_context, show_tokens
from octavo.planner.tables import show_bytes, show_count
from octavo.planner.walks.walk import Graph, Part, Table, Walk, Words
from octavo.replay.hardware import Hardware

LENGTHS = (1, 16, 64, 256, 1024, 4096)
CONTEXTS = (4096, 32768, 131072)
COMPARED = tuple(1 << power for power in range(9, 18))
LATENT_NUMBERS = 512 + 64  # of DeepSeek's latents: rank and rope key


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one run on this machine."""

    what: str
    tokens: int
    with_cache_s: float
    without_cache_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured for a walk, and on what."""

    machine: str
    runs: tuple[Measured, ...] = ()


def phases(plan: Plan, measured: Measurements | None) -> Walk:
    """Prefill computes much for each byte that it reads, decode little."""
    hardware = plan.request.hardware
    rows = []
    for tokens in (1, 4, 16, 64, 256, 1024):
        multiply_adds = plan.work.prefill(tokens)
        read = plan.step_of(1).weights_bytes + plan.cache.of(tokens)
        rows.append(_intensity("prefill", tokens, multiply_adds, read, hardware))
    step = plan.step
    rows.append(_intensity(f"decode at {plan.context}", 1, step.multiply_adds, step.bytes_read, hardware))
    for batch in (8, 64):
        many = plan.step_of(batch)
        name = f"decode at {plan.context}, batch {batch}"
        rows.append(_intensity(name, batch, many.multiply_adds, many.bytes_read, hardware))
    parts: list[Part] = [
        Words(
            f"A request to {plan.geometry.model} has two kinds of work. Prefill takes all tokens of a prompt at once: "
            "each weight that is read is used for every token. Decode takes one token a step: all weights and the "
            "whole cache are read for it. Arithmetic intensity, multiply-adds for each byte read, tells them apart."
        ),
        Table("Intensity by tokens of a step", rows),
        Graph(_intensities(plan)),
    ]
    if hardware is not None:
        ridge = hardware.flops_per_s / 2 / hardware.bytes_per_s
        parts.append(
            Words(
                f"{hardware.name} does {ridge:.0f} multiply-adds in the time in which it reads a byte. Below that the "
                "memory is the bound and arithmetic waits; above it is the other way round. That is why a larger "
                "batch of decodes is nearly free, until the cache that each sequence reads outweighs the weights."
            )
        )
    else:
        parts.append(Words("With --gpu NAME the table also says what bounds each step on that device."))
    if measured is not None and measured.runs:
        parts.append(_measured_phases(measured))
    parts.append(
        Words(
            "octavo has no phases inside: a request has computed tokens that catch up with its known ones, so that a "
            "prompt, a piece of a prompt and one new token are the same code, and run in the same step."
        )
    )
    return Walk("Prefill and decode", tuple(parts))


def _intensities(plan: Plan) -> Chart:
    tokens = tuple(1 << power for power in range(11))
    weights = plan.step_of(1).weights_bytes
    prefill = tuple((float(n), plan.work.prefill(n) / (weights + plan.cache.of(n))) for n in tokens)
    decode = tuple((float(n), plan.step_of(n).intensity) for n in tokens)
    series = [Series("prefill", prefill), Series(f"decode at {plan.context}", decode)]
    hardware = plan.request.hardware
    if hardware is not None:
        ridge = hardware.flops_per_s / 2 / hardware.bytes_per_s
        series.append(Series(hardware.name, ((1.0, ridge), (float(tokens[-1]), ridge)), is_level=True))
    title = f"Multiply-adds for each byte read, {plan.geometry.model}"
    return Chart(
        title, "tokens of a step", "multiply-adds a byte", tuple(series), lambda n: f"{n:g}", lambda v: f"{v:g}"
    )


def _measured_phases(measured: Measurements) -> Table:
    rows = [
        {
            "what": run.what,
            "tokens": run.tokens,
            "ms": run.with_cache_s * 1e3,
            "ms_a_token": run.with_cache_s * 1e3 / run.tokens,
        }
        for run in measured.runs
    ]
    return Table(f"Measured on {measured.machine}", rows)


def _intensity(name: str, tokens: int, multiply_adds: int, read: int, hardware: Hardware | None) -> dict[str, object]:
    row: dict[str, object] = {
        "step": name,
        "tokens": tokens,
        "multiply_adds": multiply_adds,
        "read_bytes": read,
        "multiply_adds_per_byte": multiply_adds / read,
    }
    if hardware is not None:
        by_memory = read / hardware.bytes_per_s
        by_work = 2 * multiply_adds / hardware.flops_per_s
        row["bound_ms"] = 1e3 * max(by_memory, by_work)
        row["bound_by"] = "memory" if by_memory >= by_work else "arithmetic"
    return row


def recompute(plan: Plan, measured: Measurements | None) -> Walk:
    """What it costs to compute everything again for each token."""
    work = plan.work
    rows = []
    for length in LENGTHS:
        cached, uncached = work.with_cache(1, length), work.without_cache(1, length)
        rows.append(
            {
                "tokens": length,
                "multiply_adds_with_cache": cached,
                "multiply_adds_without": uncached,
                "times": uncached / cached,
                "cache_bytes": plan.cache.of(length),
            }
        )
    doubled = work.without_cache(1, 4096) / work.without_cache(1, 2048)
    doubled_with = work.with_cache(1, 4096) / work.with_cache(1, 2048)
    parts: list[Part] = [
        Words(
            "To write token n, attention looks at the keys and values of the n - 1 tokens before it. They were "
            "computed for the token before as well, and for the one before that. Without a cache every new token "
            "computes all of them again; with one, each token is computed once and kept."
        ),
        Table(f"A text by {plan.geometry.model} from its first token on", rows),
        Graph(_growth(plan)),
        Words(
            f"From 2,048 to 4,096 tokens the work without a cache grows {doubled:.2f} times, with it "
            f"{doubled_with:.2f} times: four and two, quadratic against linear, and what attention over longer texts "
            f"adds. What is paid is memory: {show_bytes(float(plan.cache.bytes_per_token))} a token."
        ),
    ]
    if measured is not None and measured.runs:
        parts.append(_measured_texts(measured))
        parts.append(Words("Both write the same tokens: the cache never changes an answer."))
    return Walk("What a cache saves", tuple(parts))


def _growth(plan: Plan) -> Chart:
    work = plan.work
    return Chart(
        f"Multiply-adds of a text, {plan.geometry.model}",
        "tokens written",
        "multiply-adds",
        (
            Series("with the cache", tuple((float(n), float(work.with_cache(1, n))) for n in LENGTHS)),
            Series("without", tuple((float(n), float(work.without_cache(1, n))) for n in LENGTHS)),
        ),
        lambda value: f"{value:g}",
        show_count,
    )


def _measured_texts(measured: Measurements) -> Table:
    return Table(
        f"Measured on {measured.machine}: the same text with the cache and with --no-kv-cache",
        [
            {
                "new_tokens": run.tokens,
                "seconds_with_cache": run.with_cache_s,
                "seconds_without": run.without_cache_s,
                "times": (run.without_cache_s or 0.0) / run.with_cache_s,
            }
            for run in measured.runs
        ],
    )


def memory(plan: Plan) -> Walk:
    """The byte formula with the model's numbers."""
    cache, geometry = plan.cache, plan.geometry
    rows = []
    for context in CONTEXTS:
        for batch in (1, 8):
            kv_bytes = cache.of(context, batch)
            row: dict[str, object] = {"context": context, "batch": batch, "kv_bytes": kv_bytes}
            if plan.weights_bytes:
                row["times_weights"] = kv_bytes / plan.weights_bytes
            rows.append(row)
    parts: list[Part] = [
        Words(f"Each token of a text leaves in the cache of {geometry.model} ({geometry.attention}):"),
        Table(
            "Bytes by group of layers",
            [
                {
                    "group": group.name,
                    "formula": group_formula(group, cache.kv_format),
                    "bytes_per_token": float(cache.per_token(group)),
                    "bytes_per_sequence": cache.per_sequence(group),
                }
                for group in cache.groups
            ],
        ),
        Table("By context and batch", rows),
        Graph(by_context(plan)),
    ]
    crossing = plan.crossover_tokens
    if plan.weights_bytes:
        text = (
            f"The weights have {show_bytes(plan.weights_bytes)} whatever happens. The cache of one sequence passes "
            f"them at {crossing:,} tokens."
            if crossing is not None
            else f"The weights have {show_bytes(plan.weights_bytes)}; the cache never passes them, as every layer has "
            "a window or a fixed state."
        )
        parts.append(Words(text + " Growth is linear in the length, and linear in the number of sequences."))
    parts.append(
        Words(
            f"Every new token reads the whole cache of its sequence: {show_bytes(cache.read(plan.context))} at "
            f"{plan.context:,} tokens, beside {show_bytes(plan.step.weights_bytes)} of weights."
        )
    )
    return Walk("The account of the cache", tuple(parts))


def compression(plan: Plan) -> Walk:
    """Three ways to keep less."""
    comparisons = Comparisons(plan)
    keys = ("kv_bytes_per_token", "kv_bytes", "relative")

    def kept(rows: Sequence[dict[str, object]], name: str) -> list[dict[str, object]]:
        return [
            {key: row[key] for key in (name, *(["attention"] if "attention" in row else []), *keys)} for row in rows
        ]

    group = next((group for group in plan.cache.groups if group.v_head_dim), None)
    parts: list[Part] = [
        Words(
            f"One sequence of {plan.context:,} tokens of {plan.geometry.model} takes "
            f"{show_bytes(plan.cache.of(plan.context))}. There are three ways to make it less; they can be combined."
        ),
        Words("First, fewer heads: several query heads share one pair of K and V. The model must be trained for it."),
        Table("Fewer heads", kept(list(comparisons.heads()), "num_kv_heads")),
        Words("Second, coarser numbers: the same K and V in fewer bits. It is a switch; answers change a little."),
        Table("Coarser numbers", kept(list(comparisons.formats()), "kv_cache_dtype")),
        Words("Third, fewer tokens: layers that look at a window keep no more than that, however long the text is."),
        Table(
            "Fewer tokens, at 131,072 of them",
            [
                {
                    "window": window,
                    "kv_bytes": cache.of(131072),
                    "relative": cache.of(131072) / max(1, plan.cache.of(131072)),
                }
                for window, cache in comparisons.with_windows()
            ],
        ),
    ]
    if group is not None:
        parts.append(_latent_words(group.numbers_per_entry))
    parts.insert(1, Graph(_three_ways(plan)))
    both = replace(plan.cache, kv_format="fp8")
    parts.append(
        Words(
            f"Together: in fp8 this model's sequence takes {show_bytes(both.of(plan.context))}; beside that, paging "
            "(`octavo explain paging`) and sharing (`octavo explain sharing`) waste and copy less of it."
        )
    )
    return Walk("Three ways of compression", tuple(parts))


def _three_ways(plan: Plan) -> Chart:
    """The cache by context as it is, and in each of the three ways."""
    groups = plan.cache.groups
    ways = {
        "as it is": plan.cache,
        "one KV head": replace(
            plan.cache, groups=tuple(replace(g, num_kv_heads=1) if g.v_head_dim else g for g in groups)
        ),
        "fp8": replace(plan.cache, kv_format="fp8"),
        "a window of 4,096": dict(Comparisons(plan).with_windows())[4096],
    }
    series = [
        Series(name, tuple((float(n), float(cache.of(n))) for n in COMPARED if cache.of(n)))
        for name, cache in ways.items()
    ]
    return Chart(
        f"Three ways to a smaller cache, {plan.geometry.model}",
        "tokens of a sequence",
        "bytes",
        tuple(each for each in series if each.points),
        show_tokens,
        show_bytes,
    )


def _latent_words(numbers: int) -> Words:
    """numbers: what a layer of the model keeps of a token."""
    if numbers <= LATENT_NUMBERS:
        return Words(
            f"A latent (MLA) would keep {LATENT_NUMBERS} numbers of a token and layer; this model keeps {numbers}, so "
            "there is nothing to gain."
        )
    return Words(
        f"A latent (MLA) keeps {LATENT_NUMBERS} numbers of a token and layer for all heads, where this model keeps "
        f"{numbers}: {1 - LATENT_NUMBERS / numbers:.0%} less, or {numbers / LATENT_NUMBERS:.1f} times smaller."
    )
