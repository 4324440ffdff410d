"""Questions about something far back: LongEval's lines and key-value retrieval, cut to what a small context holds."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Question:
    text: str  # what the user says
    before: str  # how the answer begins
    answer: str  # what must follow


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def long_eval(path: Path, count: int, num_lines: int) -> list[Question]:
    """Of each record (Li et al. 2023, LongEval) the line that is asked for and some others, in their order."""
    found = []
    for number, record in zip(range(count), read_lines(path), strict=False):
        head, *lines, _, question = str(record["prompt"]).strip().replace("\n\nNow", "\n\n\nNow").split("\n")
        lines = [line for line in lines if line.startswith("line ")]
        asked = next(i for i, line in enumerate(lines) if line == str(record["correct_line"]).strip())
        others = random.Random(number).sample([i for i in range(len(lines)) if i != asked], num_lines - 1)
        kept = [lines[i] for i in sorted([*others, asked])]
        key = str(record["random_idx"][0])  # type: ignore[index]
        text = "\n".join([head, "", *kept, "", question])
        found.append(Question(text, f"The <REGISTER_CONTENT> in line {key} is <", f"{record['expected_number']}>"))
    return found


def key_values(path: Path, count: int, num_pairs: int) -> list[Question]:
    """Of each record (Liu et al. 2023, Lost in the Middle) the pair that is asked for and some others, in order."""
    found = []
    for number, record in zip(range(count), read_lines(path), strict=False):
        pairs: list[list[str]] = record["ordered_kv_records"]  # type: ignore[assignment]
        asked = next(i for i, pair in enumerate(pairs) if pair[0] == record["key"])
        others = random.Random(number).sample([i for i in range(len(pairs)) if i != asked], num_pairs - 1)
        kept = "\n".join(f'"{pairs[i][0]}": "{pairs[i][1]}",' for i in sorted([*others, asked]))
        text = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n{\n"
            f'{kept}\n}}\n\nKey: "{record["key"]}"\nCorresponding value:'
        )
        found.append(Question(text, f'"{record["key"]}": "', f'{record["value"]}"'))
    return found
