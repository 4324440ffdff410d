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


def table(medians: dict[str, dict[str, Any]], engines: list[str]) -> str:
    peers = [name for name in engines if name != "octavo"]
    lines = [f"| workload | octavo | {' | '.join(peers)} | against the best | share of the roofline |"]
    lines.append("|---" * (len(peers) + 4) + "|")
    for name, row in medians.items():
        cells = [str(row[peer]) if row.get(peer) is not None else "-" for peer in ["octavo", *peers]]
        best, share = row.get("speed_against_best_peer"), row.get("share_of_roofline")
        ends = [f"{best}x" if best else "-", f"{share:.0%}" if share else "-"]
        lines.append(f"| {TITLES[name]} | {' | '.join([*cells, *ends])} |")
    return "\n".join(lines)


def speeds(medians: dict[str, dict[str, Any]], peer: str) -> list[float]:
    """octavo's speed over the peer's, for each workload; 0 where the peer has no figure."""
    found = []
    for row in medians.values():
        ours, theirs = row.get("octavo"), row.get(peer)
        higher = "tokens/s" in row["unit"]
        found.append((ours / theirs if higher else theirs / ours) if ours and theirs else 0.0)
    return found


def draw(medians: dict[str, dict[str, Any]], engines: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = [name for name in engines if name != "octavo"]
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    width = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        places = [place + index * width for place in range(len(medians))]
        values = speeds(medians, peer)
        bars = axes.bar(places, values, width, label=peer)
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
