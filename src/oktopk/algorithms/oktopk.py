"""Ok-Topk (Li and Hoefler, PPoPP'22): a sparse all-reduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms.base import Asks, less, mean_of, plus
from oktopk.config import OkTopkConfig, RandomKConfig
from oktopk.primitives.collectives import Tools, gather_regions, reduce_at, split_and_reduce
from oktopk.primitives.lottery import Lottery
from oktopk.primitives.partition import Regions, balanced_regions, region_loads
from oktopk.primitives.selection import ReusedThreshold, Winners, winners, winners_above, without
from oktopk.schedule import is_due
from oktopk.types import Difference, Reduced, Source, SparseVector, Stats, index_dtype, to_dense


class OkTopk:
    """Volume about 4k(P-1)/P words with fresh thresholds, never above 6k(P-1)/P; no method can do with less than 2k."""

    def __init__(self, config: OkTopkConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools
        self._local = ReusedThreshold(
            config.reestimate_every, config.local_nudge, config.local_nudge, config.local_keep, config.cap
        )
        self._global = ReusedThreshold(
            config.reestimate_every, config.global_nudge_up, config.global_nudge_down, config.global_keep, config.cap
        )
        self._lottery = Lottery(in_turn=True, block=RandomKConfig().block)
        self._octave = 127  # where the last global threshold was: 2**0 to begin with
        self._bounds: list[int] = []
        self._step = 0

    def reduce(self, acc: Source, k: int) -> Reduced:
        turn = self._turn(acc, k)
        reduced = self._reduce_largest(acc, k - turn.numel(), turn)
        if turn.numel():
            reduced = self._with_turn(reduced, acc, turn)
        self._step += 1
        return reduced

    def _reduce_largest(self, acc: Source, k: int, turn: Tensor) -> Reduced:
        tools = self._tools
        # 1. Choose locally, but not what is sent in turn.
        chosen, threshold = self._choose(acc, k)
        chosen = without(chosen, turn, tools.kernels)
        # 2. Agree on regions that hold equally many of the chosen coordinates.
        regions = self._regions(chosen)
        # 3. Send each coordinate to the rank that owns its region, and sum there.
        region, values = split_and_reduce(chosen, regions, self._config.in_flight, tools)
        # 4. Keep the global winners.
        won = self._win(region, k, acc.numel())
        # 5. Tell everyone, after evening the blocks out if one is far longer than the mean.
        total, lost, sizes = gather_regions(won.kept, regions.bounds, tools, self._config.balance_factor, won.counts)
        # 6. An entry leaves this rank only if this rank chose it and it survived globally.
        sent = less(tools.kernels.common(chosen.with_values(values), total.indices), lost)
        imbalance = max(sizes) * len(sizes) / max(1, sum(sizes))
        stats = Stats(chosen.nnz, total.nnz, threshold, won.threshold, imbalance)
        return Reduced(mean_of(total, tools.world_size), sent, stats)

    @property
    def asks(self) -> Asks:
        if self._config.threshold == "reused":
            return "everything"
        return "both" if self._config.in_turn else "largest"

    def ask_ahead(self, acc: Difference, k: int) -> None:
        turn = self._turn(acc, k)
        acc.picked = self._tools.kernels.pick(acc, turn)
        acc.largest = self._tools.kernels.select_topk(acc, k - turn.numel())

    def _turn(self, acc: Source, k: int) -> Tensor:
        """Coordinates that are sent whatever they are, the same on all ranks; none if all will be sent."""
        share = min(max(1, round(self._config.in_turn * k)), k - 1) if k < acc.numel() else 0
        if not self._config.in_turn or not share:
            return torch.empty(0, dtype=index_dtype(acc.numel()))
        return self._lottery.draw(acc.numel(), share, self._step)

    def _with_turn(self, largest: Reduced, acc: Source, turn: Tensor) -> Reduced:
        """Also send these, of which only values travel."""
        assert isinstance(largest.mean, SparseVector) and isinstance(largest.sent, SparseVector)
        mean, sent = reduce_at(acc, turn, self._tools)
        local, survived = (
            count + turn.numel() for count in (largest.stats.selected_local, largest.stats.selected_global)
        )
        return Reduced(
            self._tools.kernels.sum_sparse([largest.mean, mean]),
            plus(largest.sent, sent),
            replace(largest.stats, selected_local=local, selected_global=survived),
        )

    def _choose(self, acc: Source, k: int) -> tuple[SparseVector, float]:
        if self._config.threshold == "reused":
            return self._local.select(to_dense(acc), k, self._tools.kernels)
        return self._tools.largest(acc, k)

    def _regions(self, chosen: SparseVector) -> Regions:
        is_stale = not self._bounds or is_due(self._step, self._config.repartition_every)
        if not is_stale and not self._is_lopsided(chosen):
            return Regions(self._bounds)
        regions = balanced_regions(chosen.indices, chosen.numel, self._tools.transport)
        self._bounds = regions.bounds
        return regions

    def _is_lopsided(self, chosen: SparseVector) -> bool:
        """Whether the regions of an earlier step would give one rank so much that it breaks the bound."""
        loads = region_loads(chosen.indices, self._bounds, self._tools.transport)
        return max(loads) * len(loads) > self._config.cap * sum(loads)

    def _win(self, region: SparseVector, k: int, numel: int) -> Winners:
        if self._config.threshold == "reused" and k < numel and not self._global.is_due(k):
            won = winners_above(region, self._global.value, self._octave, self._tools.kernels)
            counts = [row[0] for row in self._tools.transport.agree([won.kept.nnz])]
            if sum(counts) and not self._global.is_too_many(sum(counts), k):
                self._global.nudge(sum(counts), k)
                return replace(won, counts=counts)
        won = winners(region, k, self._octave, numel, self._tools.transport, self._tools.kernels)
        self._octave = won.octave
        self._global.renew(won.threshold, k)
        return won

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "octave": self._octave,
            "bounds": list(self._bounds),
            "local": self._local.state_dict(),
            "global": self._global.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._octave = int(state["step"]), int(state["octave"])
        self._bounds = [int(bound) for bound in state["bounds"]]
        self._local.load_state_dict(state["local"])
        self._global.load_state_dict(state["global"])
