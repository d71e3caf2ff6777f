"""Ok-Topk (Li and Hoefler, PPoPP'22): a sparse all-reduce whose volume does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oktopk.algorithms.base import Asks, Choice, less, mean_of, plus
from oktopk.config import OkTopkConfig, RandomKConfig
from oktopk.primitives.collectives import (
    Gathered,
    Told,
    Tools,
    both,
    cut,
    gather_regions,
    nothing_told,
    reduce_at,
    split_and_reduce,
    tell_above,
)
from oktopk.primitives.likely import LikelyWinners
from oktopk.primitives.lottery import Lottery
from oktopk.primitives.partition import Choices, Regions, balanced_regions, kept_regions, tell
from oktopk.primitives.selection import ReusedThreshold, Winners, exponent_of, winners, winners_above, without
from oktopk.schedule import is_due
from oktopk.types import Difference, Reduced, Source, SparseVector, Stats, index_dtype, to_dense


class OkTopk:
    """Volume about 4k(P-1)/P words with fresh thresholds, never above 6k(P-1)/P; no method can do with less than 2k."""

    knows_senders = False  # an owner tells sums, and not of how many

    def __init__(self, config: OkTopkConfig, tools: Tools) -> None:
        self._config, self._tools = config, tools
        self._local = ReusedThreshold(
            config.reestimate_every, config.local_nudge, config.local_nudge, config.local_keep, config.cap
        )
        self._global = ReusedThreshold(
            config.reestimate_every, config.global_nudge_up, config.global_nudge_down, config.global_keep, config.cap
        )
        self._likely = LikelyWinners()
        self._lottery = Lottery(in_turn=True, block=RandomKConfig().block)
        self._exponent = 127  # where the last global threshold was: 2**0 to begin with
        self._bounds: list[int] = []
        self._step = 0

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        turn = self._turn(acc, k)
        reduced = self._reduce_largest(choice or self._chosen(acc, k), k - turn.numel())
        if turn.numel():
            reduced = self._with_turn(reduced, acc, turn)
        self._step += 1
        return reduced

    def _reduce_largest(self, choice: Choice, k: int) -> Reduced:
        tools, chosen = self._tools, choice.chosen
        # 1. Every rank has chosen locally, and tells where.
        choices = Choices.of(choice.told or tools.transport.agree(choice.words))
        # 2. Agree on regions that hold equally many of the chosen coordinates.
        regions = self._regions(choices, chosen.numel)
        # 3. Send each coordinate to the rank that owns its region, and sum there.
        region, values = split_and_reduce(chosen, regions, self._config.in_flight, tools)
        # 4. Keep the global winners, and tell everyone.
        (total, lost, sizes), smallest = self._win(region, regions, k, choices.level)
        # 5. An entry leaves this rank only if this rank chose it and it survived globally.
        sent = less(tools.kernels.common(chosen.with_values(values), total.indices), lost)
        imbalance = max(sizes) * len(sizes) / max(1, sum(sizes))
        stats = Stats(chosen.nnz, total.nnz, choice.threshold, smallest, imbalance)
        return Reduced(mean_of(total, tools.world_size), sent, stats)

    @property
    def asks(self) -> Asks:
        if self._config.threshold == "reused":
            return "everything"
        return "both" if self._config.in_turn else "largest"

    def choose(self, acc: Source, k: int) -> Choice | None:
        return self._chosen(acc, k) if self._config.threshold == "fresh" else None

    def ask_ahead(self, acc: Difference, k: int) -> None:
        turn = self._turn(acc, k)
        acc.picked = self._tools.kernels.pick(acc, turn)
        acc.largest = self._tools.kernels.select_topk(acc, k - turn.numel())

    def _chosen(self, acc: Source, k: int) -> Choice:
        """The largest entries, but not what is sent in turn."""
        turn = self._turn(acc, k)
        chosen, threshold = self._choose(acc, k - turn.numel())
        chosen = without(chosen, turn, self._tools.kernels)
        return Choice(chosen, threshold, tell(chosen, threshold, self._tools.world_size))

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

    def _regions(self, choices: Choices, numel: int) -> Regions:
        if self._bounds and not is_due(self._step, self._config.repartition_every):
            kept = kept_regions(self._bounds, choices)
            if kept.load <= self._config.cap:  # else they would give one rank so much that it breaks the bound
                return kept
        regions = balanced_regions(choices, numel)
        self._bounds = regions.bounds
        return regions

    def _win(self, region: SparseVector, regions: Regions, k: int, level: float) -> tuple[Gathered, float]:
        """Those of all regions that survive, on every rank; and the smallest magnitude of them."""
        if self._config.threshold == "reused":
            won = self._pass(region, k, regions.bounds)
            return self._gather(won, regions.bounds), won.threshold
        told = self._tell_likely(region, regions, k, level)
        gathered, missing, is_all = told.gathered, told.missing(k), told.more == 0
        if missing:  # in further rounds
            rest = without(region, told.block.indices, self._tools.kernels)
            won = self._find(rest, missing, regions.bounds)
            gathered, is_all = both(gathered, self._gather(won, regions.bounds), self._tools), won.threshold == 0.0
        gathered, smallest = cut(gathered, k, self._tools.kernels)
        self._exponent = exponent_of(smallest) if smallest else self._exponent
        passes = 0.0 if is_all else smallest
        self._likely.learn(gathered.total, passes, k, level, self._tools.world_size, self._tools.kernels)
        return gathered, smallest

    def _tell_likely(self, region: SparseVector, regions: Regions, k: int, level: float) -> Told:
        """Gather what the last step lets expect to survive."""
        guess = self._likely.guess(level, k, regions, self._config.balance_factor)
        if guess is None:
            return nothing_told(region, regions.bounds, self._tools)
        told = tell_above(region, guess, regions.bounds, self._tools)
        self._likely.judge(told.reached, k, is_enough=not told.missing(k))
        return told

    def _pass(self, region: SparseVector, k: int, bounds: list[int]) -> Winners:
        """What reaches the re-used global threshold, unless that is due, or lets too many through."""
        if k < bounds[-1] and not self._global.is_due(k):
            won = winners_above(region, self._global.value, self._exponent, self._tools.kernels)
            counts = [row[0] for row in self._tools.transport.agree([won.kept.nnz])]
            if sum(counts) and not self._global.is_too_many(sum(counts), k):
                self._global.nudge(sum(counts), k)
                return replace(won, counts=counts)
        won = self._find(region, k, bounds)
        self._global.renew(won.threshold, k)
        return won

    def _find(self, region: SparseVector, k: int, bounds: list[int]) -> Winners:
        won = winners(region, k, self._exponent, bounds[-1], self._tools.transport, self._tools.kernels)
        self._exponent = won.exponent
        return won

    def _gather(self, won: Winners, bounds: list[int]) -> Gathered:
        """After evening the blocks out if one is far longer than the mean."""
        return gather_regions(won.kept, bounds, self._tools, self._config.balance_factor, won.counts)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "exponent": self._exponent,
            "bounds": list(self._bounds),
            "likely": self._likely.state_dict(),
            "local": self._local.state_dict(),
            "global": self._global.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._exponent = int(state["step"]), int(state["exponent"])
        self._bounds = [int(bound) for bound in state["bounds"]]
        if "likely" in state:  # not in one that 0.1 saved: the next step finds it
            self._likely.load_state_dict(state["likely"])
        self._local.load_state_dict(state["local"])
        self._global.load_state_dict(state["global"])
