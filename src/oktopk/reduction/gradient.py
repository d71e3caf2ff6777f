"""A gradient on its way: one vector, which lies in memory in one piece or in one for each parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.types import Reduced, SparseVector, Vector

Layout = tuple[tuple[str, int], ...]  # (parameter name, numel) in the order they lie in a flat bucket


@dataclass(frozen=True)
class Gradient:
    """Flat tensors of one dtype on one device: one for all of the layout, or one for each of its parameters."""

    layout: Layout
    pieces: tuple[Tensor, ...]

    @classmethod
    def of(cls, layout: Sequence[tuple[str, int]], given: Tensor | Sequence[Tensor]) -> Gradient:
        pieces = (given,) if isinstance(given, Tensor) else tuple(given)
        return cls(tuple((str(name), int(numel)) for name, numel in layout), pieces)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.layout)

    @cached_property
    def numel(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.pieces[0].element_size()

    @property
    def is_scattered(self) -> bool:
        return len(self.pieces) > 1

    def views(self) -> dict[str, Tensor]:
        """The part of each parameter, by name."""
        parts = self.pieces if self.is_scattered else self.pieces[0].split([numel for _, numel in self.layout])
        return {name: part for (name, _), part in zip(self.layout, parts, strict=True)}

    def groups(self, layouts: Sequence[Layout]) -> list[Gradient]:
        """The same memory as several gradients, whose layouts make up this one's."""
        if list(layouts) == [self.layout]:
            return [self]
        views = self.views()
        return [Gradient(layout, tuple(views[name] for name, _ in layout)) for layout in layouts]

    def join_(self, out: Tensor) -> Tensor:
        """All of it as one tensor, made in `out`."""
        return torch.cat(self.pieces, out=out)

    def add_to(self, out: Tensor, residual: Tensor, kernels: Kernels, k: int) -> float:
        """out = residual + all of it; the sum of squares. `k` announces `select_topk(out, k)`."""
        return kernels.add(out, residual, self.pieces, k)

    def copy_(self, vector: Tensor) -> None:
        """Replace it by a vector, which may be this very memory."""
        for piece, part in zip(self.pieces, vector.split([piece.numel() for piece in self.pieces]), strict=True):
            if piece.data_ptr() != part.data_ptr():
                piece.copy_(part)

    def fill_(self, value: float) -> None:
        for piece in self.pieces:
            piece.fill_(value)

    @property
    def whole(self) -> Gradient:
        """What a front end handed over; `PartialGradient` is a part of it."""
        return self

    @property
    def is_there(self) -> bool:
        """Whether there is anything to look at: ranks of a host that differ hand nothing over."""
        return True

    def own(self, names: frozenset[str]) -> frozenset[str]:
        """What parameters of these names are called in this layout."""
        return names

    def parts(self) -> Sequence[Gradient]:
        """All of `whole`, as the ranks of a host share it out; `PartialWeights` has several."""
        return [self]

    def everyones(self, reduced: Reduced) -> Sequence[tuple[Gradient, Reduced]]:
        """What came of each of `parts`, of which this rank has reduced one."""
        return [(self, reduced)]

    def cut(self, vector: Tensor) -> tuple[Tensor, ...]:
        """A flat vector over the same layout, in pieces as these are."""
        return tuple(vector.split([piece.numel() for piece in self.pieces]))

    def receive_(self, mean: Vector, kernels: Kernels) -> SparseVector | None:
        """Become the mean over ranks; what rounding took from each entry, if it took anything."""
        if not isinstance(mean, SparseVector):
            self.copy_(mean)
            return None
        given, lost = rounded(mean, self.dtype)
        kernels.fill_(self.pieces, given)
        return lost

    def zero_(self, names: Collection[str]) -> None:
        """Take some parameters out."""
        if names:
            for name, part in self.views().items():
                if name in names:
                    part.zero_()


def rounded(mean: SparseVector, dtype: torch.dtype) -> tuple[SparseVector, SparseVector | None]:
    """The mean as `dtype` can hold it, and what that leaves over."""
    if mean.values.dtype == dtype:
        return mean, None
    limit = torch.finfo(dtype).max
    given = mean.with_values(mean.values.clamp(-limit, limit).to(dtype).to(mean.values.dtype))
    return given, mean.with_values(mean.values - given.values)
