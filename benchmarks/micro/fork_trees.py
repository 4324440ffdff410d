"""How the beams of a model's searches go on from each other: the trees that `octavo replay --mode sharing` scales.

    python benchmarks/micro/fork_trees.py MODEL PROMPTS.jsonl [--tokens N] [--every N] [--json PATH]

PROMPTS has an object with `turns` on each line (as MT-bench's questions); the first turn is continued, without a
template. Searches go on past the end of a text, as answers of a given length do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from octavo.engine.completion import BeamSearchParams
from octavo.llm import LLM
from octavo.replay.fork_trees import ForkTree, fork_trees, write_trees
from octavo.replay.lines import BadLines, read_lines
from octavo.replay.recorder import Recorder

WIDTHS = (2, 4, 6)


def parted_tokens(tree: ForkTree) -> float:
    """Tokens that the beams of a step have for themselves, beyond those of one: the mean over its last third."""
    count, found = len(tree.parents), []
    for end in range(count * 2 // 3, count):
        beams, own = set(range(tree.width)), 0
        for parents in reversed(tree.parents[: end + 1]):
            own += len(beams) - 1
            beams = {parents[beam] for beam in beams}
            if len(beams) == 1:
                break
        found.append(own)
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--every", type=int, default=14, help="take one prompt of so many")
    parser.add_argument("--json", type=Path, required=True, help="write the trees to this file")
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[:: arguments.every]
    prompts = [json.loads(line)["turns"][0] for line in lines]
    with tempfile.TemporaryDirectory() as folder, LLM(arguments.model, kv_cache_memory=400 << 20) as llm:
        path = Path(folder) / "searches.jsonl.gz"
        recorder = Recorder(path, llm.model.core, b"no secret", time.monotonic, {})
        for width in WIDTHS:
            about = {"max_tokens": arguments.tokens, "early_stopping": "never", "ignore_eos": True}
            llm.beam_search(prompts, BeamSearchParams(width=width, **about))
        recorder.close()
        recorded = read_lines(str(path), BadLines())
        next(recorded)
        trees = fork_trees(recorded)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    parted = {
        str(width): round(sum(found) / len(found), 1)
        for width in WIDTHS
        if (found := [parted_tokens(tree) for tree in trees if tree.width == width])
    }
    write_trees(
        arguments.json,
        trees,
        {
            "model": Path(arguments.model).name,
            "prompts": f"{arguments.prompts.name}, one of {arguments.every}; first turn, no template",
            "max_tokens": arguments.tokens,
            "early_stopping": "never",
            "widths": WIDTHS,
            "parted_tokens": parted,
            "commit": commit.stdout.strip() or "unknown",
            "command": "micro/fork_trees.py",
        },
    )
    print(f"{len(trees)} trees; tokens that beams have beyond those of one, late: {parted}")


if __name__ == "__main__":
    main()
