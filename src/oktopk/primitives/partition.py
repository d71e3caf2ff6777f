"""Who owns which slice of the flat gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.transport.base import Transport
from oktopk.types import SparseVector, index_dtype


def equal_bounds(numel: int, world_size: int) -> list[int]:
    """Borders of `world_size` regions of equal length; some are empty when numel < world_size."""
    return [numel * rank // world_size for rank in range(world_size + 1)]


class Regions(NamedTuple):
    """Who owns what, and how much there is."""

    bounds: list[int]
    counts: list[int] | None = None  # how many each rank sends to one owner at most, if that is known


def balanced_regions(chosen: Tensor, numel: int, transport: Transport) -> Regions:
    """Regions that give each rank about the same number of chosen coordinates.

    Each rank tells all others some quantiles of its choice; borders are drawn through the quantiles of all of them.
    Ranks may choose quite different coordinates: a mean of borders would then lie where nobody chose anything.
    """
    world_size = transport.world_size
    marks = _marks(world_size)
    answers = torch.tensor(transport.agree([chosen.numel(), *_quantiles(chosen, marks)]), dtype=torch.int64)
    counts, places = answers[:, 0], answers[:, 1:]
    if int(counts.sum()) == 0:
        return Regions(equal_bounds(numel, world_size), counts.tolist())
    places, order = places.flatten().sort(stable=True)
    weights = counts.double().repeat_interleave(marks)[order]
    return Regions([0, *_cut_evenly(places, weights, world_size), numel], counts.tolist())


def _cut_evenly(places: Tensor, weights: Tensor, parts: int) -> list[int]:
    """Borders between weighted places. Each weight spreads evenly around its place, so borders lie in between."""
    below = weights.cumsum(0) - weights / 2
    shares = (below[-1] + weights[-1] / 2) * torch.arange(1, parts) / parts
    right = torch.searchsorted(below, shares).clamp(1, max(1, places.numel() - 1))
    low, high = places[right - 1], places[right.clamp(max=places.numel() - 1)]
    way = (shares - below[right - 1]) / (below[right.clamp(max=places.numel() - 1)] - below[right - 1]).clamp(min=1e-9)
    return [int(border) for border in (low + ((high - low) * way.clamp(0, 1)).ceil().long())]


def region_loads(chosen: Tensor, bounds: Sequence[int], transport: Transport) -> list[int]:
    """How many coordinates all ranks together chose in each region."""
    cuts = _cuts(chosen, bounds)
    loads = torch.tensor([end - start for start, end in pairwise(cuts)], dtype=torch.int64)
    return [int(load) for load in transport.all_reduce_(loads).tolist()]


def _marks(world_size: int) -> int:
    """Quantiles per rank: enough for even regions, few enough that all of them together stay within 8 KB."""
    return max(2, min(4 * world_size, 1024 // world_size))


def _quantiles(chosen: Tensor, marks: int) -> list[int]:
    if chosen.numel() == 0:
        return [0] * marks
    middles = torch.tensor([chosen.numel() * (2 * mark + 1) // (2 * marks) for mark in range(marks)])
    return [int(place) for place in chosen[middles].tolist()]


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
