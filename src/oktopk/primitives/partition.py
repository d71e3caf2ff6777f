"""Who owns which slice of the flat gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oktopk.types import SparseVector, index_dtype


def equal_bounds(numel: int, world_size: int) -> list[int]:
    """Borders of `world_size` regions of equal length; some are empty when numel < world_size."""
    return [numel * rank // world_size for rank in range(world_size + 1)]


class Regions(NamedTuple):
    """Who owns what, and how much there is."""

    bounds: list[int]
    counts: list[int] | None = None  # how many each rank sends to one owner at most, if that is known
    load: float = 1.0  # what the busiest owner receives, as a multiple of the mean


@dataclass(frozen=True)
class Choices:
    """What all ranks told of their choices: how many entries, how large, and where."""

    counts: list[int]
    level: float  # the sum of their thresholds
    places: Tensor  # int64, [ranks, marks]: quantiles of each choice

    @classmethod
    def of(cls, told: Sequence[Sequence[int]]) -> Choices:
        rows = torch.tensor(told, dtype=torch.int64)
        thresholds = rows[:, 1].contiguous().view(torch.float64).tolist()
        return cls(rows[:, 0].tolist(), sum(thresholds), rows[:, 2:])

    def spread(self) -> tuple[Tensor, Tensor]:
        """All places in ascending order, and how many chosen entries each stands for."""
        marks = self.places.shape[1]
        places, order = self.places.flatten().sort(stable=True)
        return places, (torch.tensor(self.counts, dtype=torch.float64) / marks).repeat_interleave(marks)[order]


def tell(chosen: SparseVector, threshold: float, world_size: int) -> list[int]:
    """What a rank says of its choice, in `told_words` words."""
    bits = torch.tensor([threshold], dtype=torch.float64).view(torch.int64)
    return [chosen.nnz, int(bits), *quantiles(chosen.indices, _marks(world_size))]


def told_words(world_size: int) -> int:
    return 2 + _marks(world_size)


def balanced_regions(choices: Choices, numel: int) -> Regions:
    """Regions that give each rank about the same number of chosen coordinates.

    Borders are drawn through the quantiles of all ranks. Ranks may choose quite different coordinates: a mean of
    borders would then lie where nobody chose anything.
    """
    world_size = len(choices.counts)
    if sum(choices.counts) == 0:
        return Regions(equal_bounds(numel, world_size), choices.counts)
    return kept_regions([0, *_cut_evenly(*choices.spread(), world_size), numel], choices)


def kept_regions(bounds: list[int], choices: Choices) -> Regions:
    """Regions with these borders, and how evenly they divide what was chosen."""
    places, weights = choices.spread()
    total = sum(choices.counts)
    if total == 0:
        return Regions(bounds, choices.counts)
    below = np.interp(bounds[1:-1], places.numpy(), (weights.cumsum(0) - weights / 2).numpy())
    loads = np.diff([0.0, *below, total])
    return Regions(bounds, choices.counts, float(loads.max()) * (len(bounds) - 1) / total)


def _cut_evenly(places: Tensor, weights: Tensor, parts: int) -> list[int]:
    """Borders between weighted places. Each weight spreads evenly around its place, so borders lie in between."""
    below = weights.cumsum(0) - weights / 2
    shares = (below[-1] + weights[-1] / 2) * torch.arange(1, parts) / parts
    right = torch.searchsorted(below, shares).clamp(1, max(1, places.numel() - 1))
    low, high = places[right - 1], places[right.clamp(max=places.numel() - 1)]
    way = (shares - below[right - 1]) / (below[right.clamp(max=places.numel() - 1)] - below[right - 1]).clamp(min=1e-9)
    return [int(border) for border in (low + ((high - low) * way.clamp(0, 1)).ceil().long())]


def _marks(world_size: int) -> int:
    """Quantiles per rank: enough for even regions, few enough that all of them together stay within 8 KB."""
    return max(2, min(4 * world_size, 1024 // world_size))


def quantiles(indices: Tensor, marks: int) -> list[int]:
    """Indices that cut an ascending list into equally many; zeros if it is empty."""
    if indices.numel() == 0:
        return [0] * marks
    middles = torch.tensor([indices.numel() * (2 * mark + 1) // (2 * marks) for mark in range(marks)])
    return [int(place) for place in indices[middles].tolist()]


def split(vector: SparseVector, bounds: Sequence[int]) -> list[SparseVector]:
    """The part of `vector` in each region, with indices that count from the region's start."""
    cuts = _cuts(vector.indices, bounds)
    return [
        SparseVector(vector.indices[start:end] - low, vector.values[start:end], high - low)
        for start, end, low, high in zip(cuts, cuts[1:], bounds, bounds[1:], strict=False)
    ]


def _cuts(indices: Tensor, bounds: Sequence[int]) -> list[int]:
    """Where each region begins and ends in an ascending list of indices."""
    inner = torch.tensor(bounds[1:-1], dtype=indices.dtype)
    return [0, *torch.searchsorted(indices, inner).tolist(), indices.numel()]


def join(parts: Sequence[SparseVector], bounds: Sequence[int]) -> SparseVector:
    """The inverse of `split`."""
    dtype = index_dtype(bounds[-1])
    indices = torch.cat([part.indices.to(dtype) + low for part, low in zip(parts, bounds, strict=False)])
    return SparseVector(indices, torch.cat([part.values for part in parts]), bounds[-1])
