"""Parts of parameters: each rank of a host has one slice of every parameter, under a name of its own.

A slice depends on its parameter alone, not on the bucket that it comes in: DDP may re-arrange its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oktopk.primitives.partition import equal_bounds
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.types import SparseVector, index_dtype


@dataclass(frozen=True)
class Part:
    """One of `count` slices of every parameter."""

    index: int
    count: int

    def name(self, parameter: str) -> str:
        return f"{parameter}[{self.index}/{self.count}]" if self.count > 1 else parameter

    def parameter(self, name: str) -> str:
        """The inverse of `name`."""
        return name.removesuffix(f"[{self.index}/{self.count}]") if self.count > 1 else name

    def of(self, vector: Tensor) -> Tensor:
        """The slice of a flat parameter."""
        low, high = self._bounds(vector.numel())
        return vector[low:high]

    def spread(self, slice: Tensor, numel: int) -> Tensor:
        """A parameter of `numel` entries of which this is the slice, and the rest is zero."""
        whole = slice.new_zeros(numel)
        self.of(whole).copy_(slice)
        return whole

    def names(self, parameters: Iterable[str]) -> frozenset[str]:
        return frozenset(map(self.name, parameters))

    def layout(self, whole: Layout) -> Layout:
        """The slices of all parameters, one after the other."""
        return tuple((self.name(name), self._length(numel)) for name, numel in whole)

    def numel(self, whole: Layout) -> int:
        return sum(self._length(numel) for _, numel in whole)

    def slices(self, whole: Gradient) -> list[Tensor]:
        """Where the slices lie in the memory of a gradient."""
        return [self.of(view) for view in whole.views().values()]

    def widen(self, vector: SparseVector, whole: Layout) -> SparseVector:
        """A vector over the slices as one over the whole parameters."""
        starts, shifts, numel = _shifts(self, whole)
        indices = vector.indices.long()
        counts = torch.searchsorted(indices, starts).diff(append=torch.tensor([indices.numel()]))
        widened = indices + shifts.repeat_interleave(counts)
        return SparseVector(widened.to(index_dtype(numel)), vector.values, numel)

    def _bounds(self, numel: int) -> tuple[int, int]:
        bounds = equal_bounds(numel, self.count)
        return bounds[self.index], bounds[self.index + 1]

    def _length(self, numel: int) -> int:
        low, high = self._bounds(numel)
        return high - low


@lru_cache(maxsize=256)
def _shifts(part: Part, whole: Layout) -> tuple[Tensor, Tensor, int]:
    """Where each slice begins among the slices, how far that is from its place in the whole; and the whole's length."""
    starts, shifts, start, offset = [], [], 0, 0
    for _, numel in whole:
        low, high = part._bounds(numel)
        starts.append(start)
        shifts.append(offset + low - start)
        start, offset = start + high - low, offset + numel
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(shifts, dtype=torch.int64), offset


def join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole parameters by name, of the slices that each rank of a host has by theirs."""
    owners = [Part(index, len(parts)) for index in range(len(parts))]
    names = [owners[0].parameter(name) for name in parts[0]]
    return {
        name: torch.cat([slices[owner.name(name)].flatten() for owner, slices in zip(owners, parts, strict=True)])
        for name in names
    }
