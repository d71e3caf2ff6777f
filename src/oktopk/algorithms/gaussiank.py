"""Gaussian-k: a threshold from mean and standard deviation instead of a sort."""

from __future__ import annotations

from torch import Tensor

from oktopk.algorithms.base import Choice, Stateless, less, mean_of
from oktopk.config import GaussianKConfig
from oktopk.primitives.collectives import Tools, gather_regions, gather_vectors, split_and_reduce
from oktopk.primitives.partition import Regions, equal_bounds
from oktopk.primitives.selection import gaussian_select, most_selected
from oktopk.types import Reduced, SparseVector, Stats


class GaussianK(Stateless):
    """Volume 2k'(P-1), k' being what the threshold lets through."""

    def __init__(self, config: GaussianKConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools

    def reduce(self, acc: Tensor, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Choose locally.
        chosen, threshold = gaussian_select(
            acc, k, self._config.corrections, self._config.tolerance, self._tools.kernels
        )
        # 2. Sum, by owners of regions or everywhere.
        exchange = self._by_regions if self._config.split_and_reduce else self._everywhere
        total, sent = exchange(chosen, most_selected(k, self._config.tolerance))
        return Reduced(mean_of(total, self._tools.world_size), sent, Stats(chosen.nnz, total.nnz, threshold))

    def _everywhere(self, chosen: SparseVector, most: int) -> tuple[SparseVector, SparseVector]:
        everyone = gather_vectors(chosen, most, self._tools)
        return everyone.total, everyone.sent

    def _by_regions(self, chosen: SparseVector, most: int) -> tuple[SparseVector, SparseVector]:
        bounds = equal_bounds(chosen.numel, self._tools.world_size)
        regions = Regions(bounds, [most] * self._tools.world_size)
        region, values = split_and_reduce(chosen, regions, self._config.in_flight, self._tools)
        total, lost, _ = gather_regions(region, bounds, self._tools)
        return total, less(chosen.with_values(values), lost)
