"""Which coordinates, without a look at their values: all ranks draw the same ones, so that no index travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.types import index_dtype

SPARE = 32  # blocks may be so long that at most one of this many entries goes without


@dataclass(frozen=True)
class Lottery:
    """Draws entries of a vector for every step of a training. The same settings draw the same on every rank.

    The vector is cut into as many stretches as there are blocks to draw, and each stretch gives one of its blocks: so
    indices come in order, and every part of a model has its share of every step.
    """

    in_turn: bool  # each block of a stretch after the other, from a random one on; else by chance
    block: int  # neighbours that are drawn together; larger = less work, coarser
    seed: int = 0

    def draw(self, numel: int, k: int, step: int) -> Tensor:
        """Hardly fewer than k coordinates of `numel`, ascending; all of them if k says so.

        By chance each has the same; in turn each comes once in `longest_wait` steps.
        """
        dtype = index_dtype(numel)
        if k >= numel:
            return torch.arange(numel, dtype=dtype)
        size = self._size(k)
        blocks = self._blocks(-(-numel // size), k // size, step)
        inside = torch.arange(size, dtype=dtype)
        indices = ((blocks * size).to(dtype)[:, None] + inside).flatten()
        surplus = (int(blocks[-1]) + 1) * size - numel  # the last block may be cut short by the end of the vector
        return indices[: indices.numel() - max(0, surplus)]

    def longest_wait(self, numel: int, k: int) -> int:
        """In turn, with this k, every coordinate is drawn once in so many steps."""
        size = self._size(k)
        blocks = -(-numel // size)
        return 1 if k >= numel else -(-blocks // (k // size))

    def _size(self, k: int) -> int:
        return max(size for size in range(1, min(self.block, k) + 1) if SPARE * (k % size) <= k)

    def _blocks(self, total: int, wanted: int, step: int) -> Tensor:
        """`wanted` of `total` blocks, ascending."""
        stretch = torch.arange(wanted + 1)
        # stretch * total // wanted, which could overflow
        borders = stretch * (total // wanted) + stretch * (total % wanted) // wanted
        starts, lengths = borders[:-1], borders.diff()
        if self.in_turn:
            return starts + (_mixed(stretch[:-1], self.seed, 0) + step) % lengths
        blocks = starts + _mixed(stretch[:-1], self.seed, step + 1) % lengths
        # Some stretches are one block longer than others: turned around, they give every block the same chance.
        turned = blocks + _mixed(stretch[:1], self.seed, -step - 1) % total
        inside = int(torch.searchsorted(turned, total))
        return torch.cat([turned[inside:] - total, turned[:inside]])


def _mixed(numbers: Tensor, seed: int, step: int) -> Tensor:
    """Random numbers in [0, 2**32), told by place, seed and step: the finaliser of splitmix64."""
    start = (0x2545F4914F6CDD1D * seed + 0x1E3779B97F4A7C15 * step) % 2**62
    mixed = (numbers + start) * -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) & 0xFFFFFFFF
