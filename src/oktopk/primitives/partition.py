"""Who owns which slice of the flat gradient."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oktopk.types import SparseVector, index_dtype

_FLOAT, _BITS = struct.Struct("<d"), struct.Struct("<q")


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
    places: np.ndarray  # int64, [ranks * marks], ascending: quantiles of all choices
    weights: np.ndarray  # float64: how many chosen entries each place stands for

    @classmethod
    def of(cls, told: Sequence[Sequence[int]]) -> Choices:
        # numpy, not torch: these are a few numbers, and in small vectors a call costs more than what it computes.
        rows = np.array(told, np.int64)
        counts, places = rows[:, 0], rows[:, 2:]
        thresholds = np.ascontiguousarray(rows[:, 1]).view(np.float64).tolist()
        order = places.ravel().argsort(kind="stable")
        weights = (counts / places.shape[1]).repeat(places.shape[1])
        return cls(counts.tolist(), sum(thresholds), places.ravel()[order], weights[order])

    @cached_property
    def below(self) -> np.ndarray:
        """How many entries lie below each place: its own weight spreads evenly around it."""
        return self.weights.cumsum() - self.weights / 2


def tell(chosen: SparseVector, threshold: float, world_size: int) -> list[int]:
    """What a rank says of its choice, in `told_words` words."""
    return [chosen.nnz, _BITS.unpack(_FLOAT.pack(threshold))[0], *quantiles(chosen.indices, _marks(world_size))]


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
    return kept_regions([0, *_cut_evenly(choices, world_size), numel], choices)


def kept_regions(bounds: list[int], choices: Choices) -> Regions:
    """Regions with these borders, and how evenly they divide what was chosen."""
    total = sum(choices.counts)
    if total == 0:
        return Regions(bounds, choices.counts)
    below = [0.0, *np.interp(bounds[1:-1], choices.places, choices.below).tolist(), total]
    busiest = max(high - low for low, high in pairwise(below))
    return Regions(bounds, choices.counts, busiest * (len(bounds) - 1) / total)


def _cut_evenly(choices: Choices, parts: int) -> list[int]:
    """Borders between weighted places."""
    places, below = choices.places, choices.below
    shares = (below[-1] + choices.weights[-1] / 2) * np.arange(1, parts) / parts
    right = np.clip(below.searchsorted(shares), 1, max(1, places.size - 1))
    left, right = right - 1, np.minimum(right, places.size - 1)
    low, high = places[left], places[right]
    way = (shares - below[left]) / np.maximum(below[right] - below[left], 1e-9)
    borders = low + np.ceil((high - low) * np.clip(way, 0, 1)).astype(np.int64)
    return [int(border) for border in borders]


def _marks(world_size: int) -> int:
    """Quantiles per rank: enough for even regions, few enough that all of them together stay within 8 KB."""
    return max(2, min(4 * world_size, 1024 // world_size))


def quantiles(indices: Tensor, marks: int) -> list[int]:
    """Indices that cut an ascending list into equally many; zeros if it is empty."""
    if indices.numel() == 0:
        return [0] * marks
    middles = indices.numel() * (2 * np.arange(marks) + 1) // (2 * marks)
    return [int(place) for place in indices.numpy()[middles].tolist()]


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
