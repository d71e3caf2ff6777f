"""Top-k with an all-gather: each rank's largest entries go to everyone."""

from __future__ import annotations

from oktopk.algorithms.base import Choice, Selecting, mean_of
from oktopk.config import TopkAConfig
from oktopk.primitives.collectives import Tools, gather_vectors
from oktopk.types import Reduced, Source, Stats


class TopkA(Selecting):
    """Volume 2k(P-1): grows with the number of ranks."""

    def __init__(self, config: TopkAConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Choose locally.
        chosen, threshold = self._tools.largest(acc, k)
        # 2. Tell everyone, and sum in the order of ranks.
        total, sent = gather_vectors(chosen, k, self._tools)
        # 3. Optionally keep only the k largest sums.
        cut = 0.0
        if self._config.global_cut and total.nnz > k:
            kept, cut = self._tools.kernels.select_topk(total.values, k)
            total = total.at(kept.indices.long())
            sent = self._tools.kernels.common(sent, total.indices)
        stats = Stats(chosen.nnz, total.nnz, threshold, cut)
        return Reduced(mean_of(total, self._tools.world_size), sent, stats)
