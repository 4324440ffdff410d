"""What a setting must keep to be certified, and why it is not: in words. It measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:  # a command's flags have their defaults from here
    from octavo.certify.measure import PathResult


@dataclass(frozen=True, slots=True)
class Limits:
    """Against the f32 cache, on the cold path and on the long one."""

    max_kl: float = 0.02  # mean, nats a token
    min_top1: float = 0.97
    max_needle_loss: float = 0.05  # of all needles: so many fewer than the reference finds

    def __post_init__(self) -> None:
        if not (self.max_kl > 0 and math.isfinite(self.max_kl)):
            raise ConfigError(f"max_kl is {self.max_kl}; it must be above 0 (0.02 is the default)")
        for name, value in (("min_top1", self.min_top1), ("max_needle_loss", self.max_needle_loss)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; it must be from 0 to 1")

    def broken_by(
        self, paths: Mapping[str, PathResult], needle_recall: float | None, of_reference: float | None
    ) -> tuple[str, ...]:
        """Empty: it is certified."""
        found = []
        for name, path in paths.items():
            if not path.is_same:
                found.append(f"the path {name} gives other bits than cold")
            if name in ("cold", "long"):
                where = "" if name == "cold" else f" over {path.distance.num_tokens} tokens"
                found += self._too_far(path, where)
        if needle_recall is not None and of_reference is not None:
            lost = of_reference - needle_recall
            if lost > self.max_needle_loss + 1e-9:
                found.append(f"it finds {needle_recall:.0%} of the needles, and the f32 cache {of_reference:.0%}")
        return tuple(found)

    def _too_far(self, path: PathResult, where: str) -> list[str]:
        distance, found = path.distance, []
        if not distance.kl_mean <= self.max_kl:
            found.append(f"KL{where} is {distance.kl_mean:.4f}, above {self.max_kl:g}")
        if not distance.top1 >= self.min_top1:
            found.append(f"top-1{where} is {distance.top1:.2%}, below {self.min_top1:.2%}")
        return found
