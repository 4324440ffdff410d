"""Replays beside the figures of the paper on paged attention: allocators, and what branches save.

    PYTHONPATH=src python benchmarks/micro/published.py --lengths SHAREGPT.csv.gz [--out PATH]

Kwon et al. 2023 (SOSP). SHAREGPT is the file of ShareGPT's lengths of the validation data. Every figure is what
`octavo replay` prints with the arguments that stand beside it; chance is seeded and no clock is read, so each machine
gives the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TREES = "benchmarks/results/fork_trees.json"
SLOTS, TOKEN_BYTES = 15_728, 819_200  # what the paper's OPT-13B has for K and V: 12 GB
ALLOCATORS = ("--mode", "allocators", "--config", "opt-13b", "--hardware", "A100-40GB")
ALLOCATORS += ("--kv-cache-memory", str(SLOTS * TOKEN_BYTES), "--latency-bound", "0.5")
SHARING = ("--mode", "sharing", "--config", "opt-13b", "--fork-trees", TREES)
LENGTHS = "LENGTHS"  # stands for the file

COLUMNS: dict[str, tuple[str, ...]] = {
    "first turns of the file": (LENGTHS, *ALLOCATORS, "--turns", "first"),
    "all its turns, prompts up to 1,024": (LENGTHS, *ALLOCATORS, "--max-prompt-len", "1024"),
    "exponential, the means of ShareGPT": ("generate:sharegpt,requests=1000", *ALLOCATORS),
    "exponential, the means of Alpaca": ("generate:alpaca,requests=1000", *ALLOCATORS),
    "branches, the means of Alpaca": ("generate:alpaca,requests=400,seed=3", *SHARING, "--limit", "400"),
    "branches, the means of ShareGPT": ("generate:sharegpt,requests=400,seed=3", *SHARING, "--limit", "400"),
    "branches, first turns of the file": (LENGTHS, *SHARING, "--limit", "1040", "--turns", "first"),
    "branches, all its turns, prompts up to 1,024": (LENGTHS, *SHARING, "--limit", "1800", "--max-prompt-len", "1024"),
}


def replay(arguments: tuple[str, ...], lengths: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "octavo.cli.main", "replay", "--json"]
    command += [str(lengths) if one == LENGTHS else one for one in arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = rounded(json.loads(done.stdout))
    return found


def rounded(found: Any) -> Any:
    """Five digits of every number: more says nothing."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(one) for one in found]
    return round(found, 5) if isinstance(found, float) else found


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """How much more the paged cache serves than others at equal latency, and blocks of other sizes at full load."""
    rows = {row["allocator"]: row for row in found["rows"]}
    paged = rows["paged 16"]
    rate = {
        name: round(paged["rate_at_latency_bound"] / row["rate_at_latency_bound"], 2)
        for name, row in rows.items()
        if row.get("rate_at_latency_bound") and name in ("ft", "orca max", "orca pow2", "orca oracle")
    }
    sizes = {
        name: round(row["throughput"] / paged["throughput"] - 1, 4)
        for name, row in rows.items()
        if name.startswith("paged")
    }
    return {"paged_16_at_equal_latency_against": rate, "throughput_against_paged_16": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lengths = given.lengths.resolve()
    columns = {}
    for name, arguments in COLUMNS.items():
        found = replay(arguments, lengths)
        shown = " ".join(lengths.name if one == LENGTHS else one for one in arguments)
        columns[name] = {"command": f"octavo replay {shown}", **found}
        if found["mode"] == "allocators":
            columns[name] |= ratios(found)
        print(name, flush=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    about = {
        "commit": git.stdout.strip(),
        "command": f"python benchmarks/micro/published.py --lengths {lengths.name}",
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "paper": "Kwon et al. 2023, SOSP: figure 2, sections 6.2 and 6.3",
    }
    text = json.dumps({"about": about, "columns": columns}, indent=1) + "\n"
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
