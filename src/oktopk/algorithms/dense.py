"""Plain all-reduce: the baseline, and what warm-up uses."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.algorithms.base import Stateless
from oktopk.config import DenseConfig
from oktopk.primitives.collectives import Tools, gather_regions, split_and_reduce
from oktopk.primitives.partition import Regions, equal_bounds
from oktopk.types import Reduced, SparseVector, Stats, index_dtype


class Dense(Stateless):
    """Every entry, every step.

    With a rounding wire each rank sums one region and hands it on, so that rounding errors have an owner to stay with;
    otherwise this is the backend's own all-reduce.
    """

    def __init__(self, config: DenseConfig, tools: Tools) -> None:
        self._tools = tools

    def reduce(self, acc: Tensor, k: int) -> Reduced:
        stats = Stats(acc.numel(), acc.numel())
        if acc.numel() == 0:
            return Reduced(acc, None, stats)
        if not self._tools.is_rounding or self._tools.world_size == 1:
            # Divided before the sum, as DDP does, so that the bits are DDP's; in place, since nothing of it stays owed.
            return Reduced(self._tools.transport.all_reduce_(acc.div_(self._tools.world_size)), None, stats)
        everything = SparseVector(
            torch.arange(acc.numel(), dtype=index_dtype(acc.numel()), device=acc.device), acc, acc.numel()
        )
        bounds = equal_bounds(acc.numel(), self._tools.world_size)
        region, sent = split_and_reduce(everything, Regions(bounds), self._tools.world_size, self._tools)
        total, lost, _ = gather_regions(region, bounds, self._tools)
        sent = sent.index_add(0, lost.indices.long(), lost.values, alpha=-1)
        return Reduced(total.values / self._tools.world_size, sent, stats)
