"""gTop-k: exact top k merged along a binary tree that keeps k at every node."""

from __future__ import annotations

from oktopk.algorithms.base import Choice, Selecting, less, mean_of
from oktopk.config import GTopkConfig
from oktopk.primitives.collectives import Tools
from oktopk.types import Reduced, Source, SparseVector, Stats


class GTopk(Selecting):
    """Volume about 4k log2 P at the root.

    The published rule forgets a partial sum that an inner node drops. Here the node that drops it keeps it as its own
    residual, and so does a node that rounds what it passes on.
    """

    def __init__(self, config: GTopkConfig, tools: Tools) -> None:
        self._tools = tools

    def reduce(self, acc: Source, k: int, choice: Choice | None = None) -> Reduced:
        # 1. Choose locally.
        chosen, threshold = self._tools.largest(acc, k)
        # 2. Merge up the tree, k at every node; what a node drops or rounds it still owes.
        partial, owed, cut = self._merge_up(chosen, k)
        # 3. Tell everyone what arrived at the root, down the same tree.
        total, lost = self._tell_down(partial)
        stats = Stats(chosen.nnz, total.nnz, threshold, cut)
        return Reduced(mean_of(total, self._tools.world_size), less(chosen, *owed, *lost), stats)

    def _merge_up(self, partial: SparseVector, k: int) -> tuple[SparseVector, list[SparseVector], float]:
        owed: list[SparseVector] = []
        cut = 0.0
        for stride in self._strides():
            lower = self._tools.rank - stride if self._tools.rank % (2 * stride) == stride else None
            upper = self._partner_above(stride)
            message = None
            if lower is not None:
                packed = self._tools.wire.pack(partial)
                owed.append(partial.with_values(partial.values - packed.values))
                message = packed.message
            received = self._tools.transport.exchange(message, lower, upper)
            if received is not None:
                merged = self._tools.kernels.sum_sparse([partial, self._tools.wire.unpack(received)])
                partial, dropped, cut = self._keep(merged, k)
                owed.append(dropped)
        return partial, owed, cut

    def _keep(self, merged: SparseVector, k: int) -> tuple[SparseVector, SparseVector, float]:
        """The k largest, the rest, and the smallest magnitude kept."""
        kept, cut = self._tools.kernels.select_topk(merged.values, k)
        positions = kept.indices.long()
        rest = merged.indices.new_ones(merged.nnz).bool()
        rest[positions] = False
        return merged.at(positions), merged.at(rest.nonzero().flatten()), cut

    def _tell_down(self, partial: SparseVector) -> tuple[SparseVector, list[SparseVector]]:
        message, total, lost = None, partial, []
        if self._tools.rank == 0:
            packed = self._tools.wire.pack(partial)
            message, total = packed.message, partial.with_values(packed.values)
            lost = [partial.with_values(partial.values - packed.values)]
        for stride in reversed(self._strides()):
            upper = self._partner_above(stride)
            lower = self._tools.rank - stride if self._tools.rank % (2 * stride) == stride else None
            received = self._tools.transport.exchange(message if upper is not None else None, upper, lower)
            if received is not None:
                message, total = received, self._tools.wire.unpack(received)
        return total, lost

    def _strides(self) -> list[int]:
        return [1 << level for level in range((self._tools.world_size - 1).bit_length())]

    def _partner_above(self, stride: int) -> int | None:
        """The rank whose sum this one takes in at this level, if it has one."""
        other = self._tools.rank + stride
        return other if self._tools.rank % (2 * stride) == 0 and other < self._tools.world_size else None
