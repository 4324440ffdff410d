"""What the text of a talk costs by turn: rendering its template, encoding all of it, and encoding what is new.

    PYTHONPATH=src python benchmarks/micro/encoding.py MODEL.gguf [--turns 100] [--repeats 5] [--json PATH]

The talk is made of plain sentences; each turn sends the whole history again, as clients do. Characters and tokens are
counted, not estimated. Times are medians of repetitions of the whole talk, milliseconds; the three ways alternate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import Tokenizer
from octavo.models.gguf_file import GgufFile

WORDS = (
    "the cache keeps what was computed and a reader asks why this block is shared with that one while another branch "
    "writes its own copy so nothing is lost when memory ends and the oldest request goes on until it has its answer"
).split()
SHOWN_TURNS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def sentence(chance: random.Random, num_words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(num_words)).capitalize() + "."


def talk_of(num_turns: int) -> list[dict[str, str]]:
    """Questions of about 20 words, answers of about 100."""
    chance = random.Random(1)
    found = []
    for _ in range(num_turns):
        found.append({"role": "user", "content": sentence(chance, chance.randint(10, 30))})
        answer = " ".join(sentence(chance, chance.randint(10, 20)) for _ in range(7))
        found.append({"role": "assistant", "content": answer})
    return found


def run_talk(
    template: ChatTemplate, tokenizer: Tokenizer, talk: list[dict[str, str]], namespace: str
) -> list[dict[str, float]]:
    """For each turn what was counted and how long it took."""
    found = []
    for turn in range(1, len(talk) // 2 + 1):
        messages = talk[: 2 * turn - 1]
        times = [time.perf_counter()]
        text = template.render(messages)
        times.append(time.perf_counter())
        whole = tokenizer.encode(text, add_special_tokens=False)
        times.append(time.perf_counter())
        before = tokenizer.encoding_counts
        ids = tokenizer.encode(text, add_special_tokens=False, namespace=namespace)
        times.append(time.perf_counter())
        after = tokenizer.encoding_counts
        assert ids == whole, f"turn {turn}: the tokens differ"
        render_ms, whole_ms, new_ms = ((end - start) * 1e3 for start, end in itertools.pairwise(times))
        found.append(
            {
                "characters": len(text),
                "tokens": len(ids),
                "encoded_characters": after.encoded_characters - before.encoded_characters,
                "encoded_tokens": after.encoded_tokens - before.encoded_tokens,
                "render_ms": render_ms,
                "encode_whole_ms": whole_ms,
                "encode_new_ms": new_ms,
            }
        )
    return found


def measure(path: Path, num_turns: int, repeats: int) -> dict[str, dict[str, float]]:
    metadata = GgufFile(path).metadata
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    template = ChatTemplate(str(metadata.get("tokenizer.chat_template") or GEMMA), tokenizer.special_tokens)
    talk = talk_of(num_turns)
    runs = [run_talk(template, tokenizer, talk, f"run {number}") for number in range(repeats)]
    return {
        f"turn {turn}": {name: statistics.median(run[turn - 1][name] for run in runs) for name in runs[0][0]}
        for turn in SHOWN_TURNS
        if turn <= num_turns
    }


def commit_id() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="+", help="GGUF files, for their tokenizers and templates")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    sections = {path.name: measure(path, arguments.turns, arguments.repeats) for path in arguments.model}
    for title, turns in sections.items():
        print(f"\n{title}\n{'':<10}" + "".join(f"{name:>20}" for name in next(iter(turns.values()))))
        for name, figures in turns.items():
            print(f"{name:<10}" + "".join(f"{value:>20.2f}" for value in figures.values()))
    if arguments.json is not None:
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "commit": commit_id(),
            "command": f"micro/encoding.py --turns {arguments.turns} --repeats {arguments.repeats}",
        }
        arguments.json.write_text(json.dumps({"about": about, "figures": sections}, indent=1) + "\n")


if __name__ == "__main__":
    main()
