"""Top-k with an all-gather: each rank's largest entries go to everyone."""

from __future__ import annotations

from oktopk.algorithms.base import Choice, Selecting, mean_of
from oktopk.config import TopkAConfig
from oktopk.primitives.collectives import Tools, gather_vectors
from oktopk.types import Reduced, Source, Stats


class TopkA(Selecting):
    """Volume 2k(P-1): grows with the number of ranks."""

    knows_senders = True

    def __init__(self, config: TopkAConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Choose locally.
        chosen, threshold = self._tools.largest(acc, k)
        # 2. Tell everyone, and sum in the order of ranks.
        everyone = gather_vectors(chosen, k, self._tools)
        # 3. Optionally keep only the k largest means.
        cut = 0.0
        mean, sent = mean_of(everyone.total, everyone.senders), everyone.sent
        if self._config.global_cut and mean.nnz > k:
            kept, cut = self._tools.kernels.select_topk(mean.values, k)
            mean = mean.at(kept.indices.long())
            sent = self._tools.kernels.common(sent, mean.indices)
        return Reduced(mean, sent, Stats(chosen.nnz, mean.nnz, threshold, cut))
