"""Top-k with a dynamic sparse all-reduce: equal regions, summed by their owners, the union gathered."""

from __future__ import annotations

import torch

from oktopk.algorithms.base import Choice, Selecting, less, mean_of
from oktopk.config import TopkDSAConfig
from oktopk.primitives.collectives import Tools, gather_regions, split_and_reduce
from oktopk.primitives.partition import Regions, equal_bounds
from oktopk.types import Reduced, Source, SparseVector, Stats


class TopkDSA(Selecting):
    """Volume up to 2k(P-1)/P + 2 min(Pk, n)(P-1)/P: the union fills in as ranks are added."""

    def __init__(self, config: TopkDSAConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Choose locally.
        chosen, threshold = self._tools.largest(acc, k)
        # 2. Send each coordinate to the rank that owns its region, and sum there.
        bounds = equal_bounds(acc.numel(), self._tools.world_size)
        region, values = split_and_reduce(
            chosen, Regions(bounds, [k] * len(bounds[1:])), self._config.in_flight, self._tools
        )
        # 3. Tell everyone all of it.
        total, lost, sizes = gather_regions(_dense_if_smaller(region), bounds, self._tools)
        sent = less(chosen.with_values(values), lost)
        imbalance = max(sizes) * len(sizes) / max(1, sum(sizes))
        return Reduced(
            mean_of(total, self._tools.world_size), sent, Stats(chosen.nnz, total.nnz, threshold, 0.0, imbalance)
        )


def _dense_if_smaller(region: SparseVector) -> SparseVector:
    """All values of a nearly full region: no indices then, where the best of them is a bitmap of numel bits."""
    if 32 * (region.numel - region.nnz) >= region.numel:
        return region
    indices = torch.arange(region.numel, dtype=region.indices.dtype)
    return SparseVector(indices, region.to_dense(), region.numel)
