"""The result of compare.py as a table in Markdown and a chart in SVG: how many times as fast as each peer octavo is.

python benchmarks/serving/chart.py benchmarks/results/serving_int8.json [--svg benchmarks/results/serving_int8.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TITLES = {
    "single": "one stream, tokens/s",
    "prefill": "prefill of 1,636 tokens, s",
    "batch": "32 users, output tokens/s",
    "shared": "shared 1,500-token prefix, 32 users, s",
    "turns": "8 conversations x 5 turns, s",
    "long": "5,456 tokens + 64, s",
}


def ours_and_peers(engines: list[str]) -> tuple[list[str], list[str]]:
    """octavo comes once for each set of flags that it was measured with."""
    ours = [name for name in engines if name.startswith("octavo")]
    return ours, [name for name in engines if name not in ours]


def table(medians: dict[str, dict[str, Any]], engines: list[str]) -> str:
    ours, peers = ours_and_peers(engines)
    lines = [f"| workload | {' | '.join([*ours, *peers])} | against the best peer | share of the roofline |"]
    lines.append("|---" * (len(engines) + 3) + "|")
    for name, row in medians.items():
        cells = [str(row[engine]) if row.get(engine) is not None else "-" for engine in [*ours, *peers]]
        ends = []
        for key, form in (("speed_against_best_peer", "{}x"), ("share_of_roofline", "{:.0%}")):
            values = [row.get(key if one == "octavo" else f"{key} of {one}") for one in ours]
            ends.append(", ".join(form.format(value) if value else "-" for value in values))
        lines.append(f"| {TITLES[name]} | {' | '.join([*cells, *ends])} |")
    return "\n".join(lines)


def speeds(medians: dict[str, dict[str, Any]], one: str, peer: str) -> list[float]:
    """octavo's speed over the peer's, for each workload; 0 where the peer has no figure."""
    found = []
    for row in medians.values():
        ours, theirs = row.get(one), row.get(peer)
        higher = "tokens/s" in row["unit"]
        found.append((ours / theirs if higher else theirs / ours) if ours and theirs else 0.0)
    return found


def draw(medians: dict[str, dict[str, Any]], engines: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours, peers = ours_and_peers(engines)
    pairs = [(one, peer) for peer in peers for one in ours]
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    width = 0.8 / len(pairs)
    for index, (one, peer) in enumerate(pairs):
        places = [place + index * width for place in range(len(medians))]
        values = speeds(medians, one, peer)
        flags = one.removeprefix("octavo").strip()
        bars = axes.bar(places, values, width, label=f"{peer}, octavo with {flags}" if flags else peer)
        axes.bar_label(bars, [f"{value:.1f}" if value else "" for value in values], fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_ylabel("octavo's speed over the peer's")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(medians))], list(medians))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    found = json.loads(args.result.read_text())
    engines = list(found["engines"])
    print(table(found["medians"], engines))
    if args.svg:
        draw(found["medians"], engines, args.svg)


if __name__ == "__main__":
    main()
