"""Random-k: coordinates drawn from a seed that all ranks share, and one all-reduce of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from oktopk.algorithms.base import Asks, Choice
from oktopk.config import RandomKConfig
from oktopk.primitives.collectives import Tools, reduce_at
from oktopk.primitives.lottery import Lottery
from oktopk.types import Difference, Reduced, Source, Stats


class RandomK:
    """Volume 2k(P-1)/P, the least that any method needs: nothing is selected, and no index travels."""

    asks: Asks = "some"
    knows_senders = False  # all send the same entries: there is nothing to know

    def __init__(self, config: RandomKConfig, tools: Tools) -> None:
        self._tools = tools
        self._lottery = Lottery(config.order == "turn", config.block, config.draw_seed)
        self._step = 0

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Draw, the same on every rank.
        indices = self._draw(acc, k)
        # 2. One all-reduce of the values there.
        mean, sent = reduce_at(acc, indices, self._tools)
        self._step += 1
        return Reduced(mean, sent, Stats(mean.nnz, mean.nnz))

    def choose(self, acc: Source, k: int) -> Choice | None:
        return None  # all ranks draw alike

    def ask_ahead(self, acc: Difference, k: int) -> None:
        acc.picked = self._tools.kernels.pick(acc, self._draw(acc, k))

    def _draw(self, acc: Source, k: int) -> Tensor:
        return self._lottery.draw(acc.numel(), k, self._step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
