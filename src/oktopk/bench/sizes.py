"""Which algorithm is fastest for short and long vectors, and is it the one that `register` takes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oktopk.bench.allreduce import AllreduceResult, Sweep
from oktopk.front_ends.defaults import LARGE, RIVAL, default_algorithm, default_rival

ALGORITHMS = ("topka", "gtopk", "oktopk")  # at a density of 0.01 others are slower everywhere
SIZES = Sweep((100_000, 300_000, 1_000_000, 3_000_000, 10_000_000), (0.01,), (2, 4, 8), ALGORITHMS, repeats=9)


@dataclass(frozen=True)
class SizeResult:
    """All algorithms with one vector among so many ranks."""

    numel: int
    world_size: int
    density: float
    seconds: dict[str, float]  # by algorithm

    @property
    def register(self) -> tuple[str, str]:
        """What the one line takes, and how it came to that. What it tries it is taken to find."""
        if self.numel < LARGE:
            return default_algorithm(self.numel, self.world_size, self.density)[0], "rule"
        if not default_rival(self.numel, self.world_size, self.density):
            return "oktopk", "rule"
        return min(("oktopk", RIVAL), key=lambda name: self.seconds[name]), "tried"

    def over_fastest(self, algorithm: str) -> float:
        return self.seconds[algorithm] / min(self.seconds.values())

    def row(self) -> dict[str, Any]:
        taken, how = self.register
        return {
            "ranks": self.world_size,
            "entries": f"{self.numel:,}",
            **{f"{name} [ms]": f"{seconds * 1e3:.1f}" for name, seconds in self.seconds.items()},
            "oktopk / fastest": f"{self.over_fastest('oktopk'):.2f}",
            "the one line takes": f"{taken} ({how})",
            "that / fastest": f"{self.over_fastest(taken):.2f}",
        }


def by_size(results: Sequence[AllreduceResult]) -> list[SizeResult]:
    """Results of a sweep, those of one vector and world together."""
    found: dict[tuple[int, int, float], dict[str, float]] = {}
    for result in results:
        found.setdefault((result.numel, result.world_size, result.density), {})[result.algorithm] = result.seconds
    ordered = sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    return [SizeResult(*key, seconds) for key, seconds in ordered]
