"""Who will win, as the step before suggests: a good guess saves the rounds that find the global threshold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, log
from typing import Any

from oktopk.kernels.base import Kernels
from oktopk.primitives.partition import Regions, quantiles
from oktopk.types import SparseVector

LOOK_UP = 1.1  # how much higher than a threshold one looks, to learn how quickly fewer entries reach it
SLOPES = (1.0, 30.0)  # between these: few entries tell nothing
MARGINS = (1.06, 1.4)  # between these: smaller = less volume, more steps in which too few entries reach the guess
YIELDS = (0.5, 2.0)  # between these
GAIN = 0.25  # how much of a surprise is believed to last; more = quicker to follow a trend, upset by one odd step
MISSED, HIT = 1.15, 0.99  # what the margin is multiplied by; settles where about one step in fifteen misses
BOUND = 3.0  # entries that a rank may receive, as a multiple of k: in words the paper's 6k
MARKS = 64  # places of winners that are remembered, per rank
EVENLY = 0.2  # share of all room that every rank gets, wherever winners were: they may be elsewhere now
SPARE_ENTRIES = 8  # room of every rank besides: few entries fall unevenly


@dataclass(frozen=True)
class Guess:
    """A threshold, and how many entries that reach it each rank may send."""

    threshold: float
    room: list[int]


@dataclass
class LikelyWinners:
    """What the last step says of the next: which sums reach the threshold, how many, and in whose region."""

    value: float = 0.0  # what k sums reached
    level: float = 0.0  # the sum of the ranks' own thresholds then; 0: nothing is known
    slope: float = 8.0  # by how many percent fewer reach a threshold that is one percent higher
    margin: float = 1.25  # how many times k the guess should let through
    yields: float = 1.0  # how many times that it does: what lost in the last step lies close below the threshold
    places: list[int] = field(default_factory=list)  # quantiles of the winners' indices

    def guess(self, level: float, k: int, regions: Regions, balance_factor: float) -> Guess | None:
        """What should let a few more than k through; None if nothing is known, or blocks would be too uneven.

        Thresholds rise and fall together: `level`, the sum of the ranks' own, tells the scale. Whatever happens, all
        ranks together have no more room than the bound on the volume leaves.
        """
        most = BOUND - regions.load
        if self.level == 0.0 or level == 0.0 or most < self.margin * MARGINS[0]:
            return None
        shares = self._shares(regions.bounds)
        if max(shares) * len(shares) > balance_factor:
            return None
        threshold = self.value * (level / self.level) * (self.yields / self.margin) ** (1 / self.slope)
        return Guess(threshold, [ceil(most * k * share) + SPARE_ENTRIES for share in shares])

    def _shares(self, bounds: Sequence[int]) -> list[float]:
        """What part of the winners each region should hold."""
        cuts = [0, *(bisect_left(self.places, border) for border in bounds[1:-1]), len(self.places)]
        ranks, marks = len(bounds) - 1, max(1, len(self.places))
        return [EVENLY / ranks + (1 - EVENLY) * (stop - start) / marks for start, stop in pairwise(cuts)]

    def learn(self, won: SparseVector, smallest: float, k: int, level: float, ranks: int, kernels: Kernels) -> None:
        """Remember the winners of a step and the smallest magnitude of them, which is 0 if nothing else was there."""
        self.level = level if won.nnz else 0.0
        self.places = quantiles(won.indices, MARKS * ranks)
        if won.nnz and smallest:
            higher = kernels.count_above(won.values, LOOK_UP * smallest)
            steepness = log(won.nnz / higher) / log(LOOK_UP) if higher else SLOPES[1]
            self.slope = _within(steepness, SLOPES)
        self.value = smallest * (won.nnz / k) ** (1 / self.slope)

    def judge(self, reached: int, k: int, is_enough: bool) -> None:
        """Learn how many sums reached the guess, so that fewer or more do from now on."""
        surprise = _within(reached / (self.margin * k), YIELDS)
        self.yields = _within(self.yields * surprise**GAIN, YIELDS)
        self.margin = _within(self.margin * (HIT if is_enough else MISSED), MARGINS)

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _NUMBERS}, "places": list(self.places)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _NUMBERS:
            setattr(self, name, float(state[name]))
        self.places = [int(place) for place in state["places"]]


_NUMBERS = ("value", "level", "slope", "margin", "yields")


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
