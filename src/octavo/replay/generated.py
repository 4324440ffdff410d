"""Traces that are made up as they are read, so that nothing of them is ever kept: `generate:KIND,key=value,...`.

Kinds: `lengths` (no text; exponential lengths of given means) and `talks` (a number of talks at once behind shared
system prompts, each turn with all that was said before). They are functions of their seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from octavo.errors import ConfigError
from octavo.replay.trace import TraceRequest

PREFIX = "generate:"
_DEFAULTS: dict[str, dict[str, float]] = {
    "lengths": {"requests": 1000, "prompt": 161.31, "output": 337.99, "rate": 0, "seed": 0},
    "talks": {
        "requests": 1000,
        "talks": 100,
        "turns": 5,
        "system": 512,
        "systems": 1,
        "prompt": 64,
        "output": 128,
        "block": 16,
        "rate": 0,
        "seed": 0,
    },
}
# Mean lengths of the two data sets in Kwon et al. 2023, figure 11.
_NAMED = {"alpaca": {"prompt": 19.31, "output": 58.45}, "sharegpt": {"prompt": 161.31, "output": 337.99}}


def generate(source: str) -> Iterator[TraceRequest]:
    """Raises ConfigError for a kind or key that there is not."""
    kind, *pairs = source.removeprefix(PREFIX).split(",")
    values = dict(_DEFAULTS["lengths" if kind in _NAMED else kind]) if kind in {**_NAMED, **_DEFAULTS} else None
    if values is None:
        raise ConfigError(f"{source} is no load that can be made up; there are {', '.join([*_DEFAULTS, *_NAMED])}")
    values |= _NAMED.get(kind, {})
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key not in values:
            raise ConfigError(f"{source}: there is no {key!r}; {kind} has {', '.join(values)}")
        try:
            values[key] = float(text)
        except ValueError as error:
            raise ConfigError(f"{source}: {key} is {text!r}; it must be a number") from error
        if not 0 <= values[key] <= 1e12:
            raise ConfigError(f"{source}: {key} is {text}; it must be from 0 to 1e12")
    return _talks(values) if kind == "talks" else _lengths(values)


def _lengths(values: dict[str, float]) -> Iterator[TraceRequest]:
    chance, now = random.Random(int(values["seed"])), 0.0
    for _ in range(int(values["requests"])):
        prompt = max(1, round(chance.expovariate(1.0) * values["prompt"]))
        output = max(1, round(chance.expovariate(1.0) * values["output"]))
        yield TraceRequest(now, prompt, output)
        now = _later(now, values["rate"], chance)


def _talks(values: dict[str, float]) -> Iterator[TraceRequest]:
    chance, now = random.Random(int(values["seed"])), 0.0
    block, turns = max(1, int(values["block"])), max(1, int(values["turns"]))
    systems = max(1, int(values["systems"]))
    system_blocks = int(values["system"]) // block
    turn_blocks = max(1, round((values["prompt"] + values["output"]) / block))
    talks = [-1] * max(1, int(values["talks"]))  # number of each talk that goes on
    said = [0] * len(talks)  # blocks of it beyond the system prompt
    num_started = 0
    for _ in range(int(values["requests"])):
        at = chance.randrange(len(talks))
        if talks[at] < 0 or said[at] >= turns * turn_blocks:
            talks[at], said[at] = num_started, 0
            num_started += 1
        talk, system = talks[at], talks[at] % systems
        prompt_blocks = said[at] + max(1, round(values["prompt"] / block))
        first = 1 + systems * system_blocks + talk * (turns + 1) * turn_blocks
        ids = [
            *range(1 + system * system_blocks, 1 + (system + 1) * system_blocks),
            *range(first, first + prompt_blocks),
        ]
        output = max(1, round(values["output"]))
        yield TraceRequest(now, len(ids) * block, output, ids, block, session=str(talk))
        said[at] += turn_blocks
        now = _later(now, values["rate"], chance)


def _later(now: float, rate: float, chance: random.Random) -> float:
    return now + (chance.expovariate(1.0) / rate if rate else 0.0)
