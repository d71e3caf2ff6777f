"""Plain all-reduce: the baseline, and what warm-up uses."""

from __future__ import annotations

from torch import Tensor

from oktopk.algorithms.base import Choice, Stateless
from oktopk.config import DenseConfig
from oktopk.primitives.collectives import Tools, reduce_all_
from oktopk.types import Reduced, Stats


class Dense(Stateless):
    """Every entry, every step."""

    def __init__(self, config: DenseConfig, tools: Tools) -> None:
        self._tools = tools

    def reduce(self, acc: Tensor, k: int, choice: Choice | None = None) -> Reduced:
        stats = Stats(acc.numel(), acc.numel())
        if acc.numel() == 0:
            return Reduced(acc, None, stats)
        # In place, since nothing of it stays owed; but for what a wire rounds, and then `sent` tells.
        mean, sent = reduce_all_(acc, self._tools)
        return Reduced(mean, sent, stats)
