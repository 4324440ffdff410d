"""How the beams of a search go on from each other, step by step: read from a recording, kept as lists of parents.

It knows no tokens and no blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.replay.lines import NumberedLine


@dataclass(frozen=True, slots=True)
class ForkTree:
    """parents[step][beam]: the beam of the step before that it goes on from. In the first step all come from beam 0."""

    parents: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        return len(self.parents[0])

    def __post_init__(self) -> None:
        if not self.parents or any(len(step) != self.width for step in self.parents):
            raise ConfigError("a fork tree needs at least one step, and as many beams in each")
        if any(not 0 <= parent < self.width for step in self.parents for parent in step):
            raise ConfigError("a fork tree names a parent that is no beam")

    def parents_at(self, step: int) -> tuple[int, ...]:
        """Beyond its end the tree goes on as from its second step."""
        count = len(self.parents)
        return self.parents[step] if step < count else self.parents[1 + (step - 1) % max(1, count - 1)]


def fork_trees(lines: Iterable[NumberedLine]) -> list[ForkTree]:
    """Those of the beam searches of a recording that had all their beams for at least two steps."""
    searches: dict[str, _Search] = {}
    for numbered in lines:
        line = json.loads(numbered.text)
        if "add" in line and line["params"].get("use_beam_search"):
            width = line["params"].get("best_of") or line["params"].get("n", 1)
            searches[line["add"]] = _Search(width)
        elif line.get("event", [""])[0] == "fork":
            _, parent, child, _ = line["event"]
            search = searches.get(_root(parent))
            if search is not None:
                search.forks[child] = parent
        elif "candidates" in line:
            for root in {_root(name) for name in line["candidates"]}:
                if root in searches:
                    searches[root].step([name for name in line["candidates"] if _root(name) == root])
    return [ForkTree(tuple(one.parents)) for one in searches.values() if len(one.parents) > 1]


class _Search:
    def __init__(self, width: int) -> None:
        self.width = width
        self.forks: dict[str, str] = {}  # child -> parent, since the last step
        self.beams: list[str] = []
        self.parents: list[tuple[int, ...]] = []

    def step(self, names: list[str]) -> None:
        """These beams have computed their last token. The first step has one, that of the prompt."""
        if self.beams and len(names) == self.width:
            parents = [self.forks.get(name, name) for name in names]
            if all(parent in self.beams for parent in parents):
                self.parents.append(tuple(self.beams.index(parent) for parent in parents))
        self.forks.clear()
        self.beams = names


def _root(name: str) -> str:
    return name.partition("#")[0]


def write_trees(path: Path, trees: Iterable[ForkTree], about: dict[str, Any]) -> None:
    text = json.dumps({"about": about, "trees": [[list(step) for step in tree.parents] for tree in trees]})
    path.write_text(text + "\n", encoding="utf-8")


def read_trees(path: Path) -> list[ForkTree]:
    """Raises ConfigError for a file that `write_trees` did not write."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        trees = [ForkTree(tuple(tuple(int(one) for one in step) for step in tree)) for tree in found["trees"]]
    except FileNotFoundError as error:
        raise ConfigError(f"there are no fork trees {path}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} holds no fork trees ({error}); make them from a recording of beam searches"
        ) from error
    if not trees:
        raise ConfigError(f"{path} holds no fork tree; record searches with two beams or more")
    return trees
