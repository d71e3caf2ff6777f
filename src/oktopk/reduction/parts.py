"""Parts of parameters: each rank of a host has one slice of every parameter, under a name of its own.

A slice depends on its parameter alone, not on the bucket that it comes in: DDP may re-arrange its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def gradient(self, whole: Gradient) -> Gradient:
        """The slices as a gradient, in the same memory."""
        return Gradient(self.layout(whole.layout), tuple(self.slices(whole)))

    def in_whole(self, vector: SparseVector, whole: Layout) -> tuple[list[Tensor], list[Tensor]]:
        """Indices in the whole vector, and values, of a vector over the slices: those of each parameter by itself."""
        starts, shifts = _shifts(self, whole)
        counts = torch.searchsorted(vector.indices, starts).diff(append=torch.tensor([vector.nnz]))
        indices = vector.indices + shifts.repeat_interleave(counts)
        sizes = counts.tolist()
        return list(indices.split(sizes)), list(vector.values.split(sizes))

    def _bounds(self, numel: int) -> tuple[int, int]:
        bounds = equal_bounds(numel, self.count)
        return bounds[self.index], bounds[self.index + 1]

    def _length(self, numel: int) -> int:
        low, high = self._bounds(numel)
        return high - low


def parts_of(count: int) -> list[Part]:
    return [Part(index, count) for index in range(count)]


@lru_cache(maxsize=256)
def _shifts(part: Part, whole: Layout) -> tuple[Tensor, Tensor]:
    """Where each slice begins among the slices, and how far that is from its place in the whole."""
    dtype = index_dtype(sum(numel for _, numel in whole))
    starts, shifts, start, offset = [], [], 0, 0
    for _, numel in whole:
        low, high = part._bounds(numel)
        starts.append(start)
        shifts.append(offset + low - start)
        start, offset = start + high - low, offset + numel
    return torch.tensor(starts, dtype=dtype), torch.tensor(shifts, dtype=dtype)


def merge(vectors: Sequence[SparseVector], whole: Layout) -> SparseVector:
    """The vectors over all parts, in their order, as one over the whole parameters."""
    numel = sum(numel for _, numel in whole)
    dtype = index_dtype(numel)
    each = [
        Part(index, len(vectors)).in_whole(replace(vector, indices=vector.indices.to(dtype)), whole)
        for index, vector in enumerate(vectors)
    ]
    # Parameter by parameter, part by part: that is the order of indices.
    indices, values = (
        [piece for parameter in zip(*lists, strict=True) for piece in parameter] for lists in zip(*each, strict=True)
    )
    return SparseVector(torch.cat(indices), torch.cat(values), numel)


def join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole parameters by name, of the slices that each rank of a host has by theirs."""
    owners = parts_of(len(parts))
    names = [owners[0].parameter(name) for name in parts[0]]
    return {
        name: torch.cat([slices[owner.name(name)].flatten() for owner, slices in zip(owners, parts, strict=True)])
        for name in names
    }
