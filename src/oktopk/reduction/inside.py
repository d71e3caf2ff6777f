"""What the ranks of one host do before and after hosts reduce sparsely: each sums one part, and tells what it won."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_device, to_host
from oktopk.reduction.agreement import Terms, refusal
from oktopk.reduction.feedback import residual_dtype
from oktopk.reduction.gradient import Gradient, Layout, rounded
from oktopk.reduction.parts import Part
from oktopk.transport.base import Transport
from oktopk.types import SparseVector, Vector
from oktopk.wire import Wire


class Inside:
    """The ranks of one host, as many as there are parts of every parameter."""

    def __init__(self, transport: Transport, wire: Wire) -> None:
        """`wire` must not round."""
        self._transport, self._wire = transport, wire
        self._parts = [Part(index, transport.world_size) for index in range(transport.world_size)]
        self.part = self._parts[transport.rank]
        self._sums: dict[Layout, Tensor] = {}
        self.gathered = 0  # how many entries came together last

    def is_common(self, words: list[int]) -> bool:
        """Whether all ranks of this host say the same. They may then scatter, and may not otherwise."""
        return all(said == words for said in self._transport.agree(words))

    def scatter(self, whole: Gradient) -> PartialGradient:
        """Sum this rank's part of the host's gradients, whose layout and dtype must be the same."""
        (*messages,) = to_host(*(torch.cat(part.slices(whole)) for part in self._parts))
        total = self._sum_of(whole)
        total.zero_()
        for _, message in self._transport.all_to_all([message.view(torch.uint8) for message in messages]):
            total += message.view(whole.dtype)
        return self.empty(whole, total)

    def empty(self, whole: Gradient, total: Tensor | None = None) -> PartialGradient:
        """What stands for a gradient of which nothing was scattered."""
        layout = self.part.layout(whole.layout)
        if total is None:
            total = torch.zeros(self.part.numel(whole.layout), dtype=residual_dtype(whole.dtype))
        return PartialGradient(layout, (total,), whole, self)

    def gather_(self, whole: Gradient, mean: Vector, kernels: Kernels) -> None:
        """Replace a gradient by the means of all parts, of which this rank has one."""
        if isinstance(mean, SparseVector):
            self._gather_sparse_(whole, mean, kernels)
        else:
            self._gather_dense_(whole, mean)

    def _gather_sparse_(self, whole: Gradient, mean: SparseVector, kernels: Kernels) -> None:
        messages = self._transport.all_gather(self._wire.pack(mean).message)
        won = [
            part.widen(self._wire.unpack(message), whole.layout)
            for part, message in zip(self._parts, messages, strict=True)
        ]
        together = kernels.sum_sparse(won)
        self.gathered = together.nnz
        kernels.fill_(whole.pieces, together)

    def _gather_dense_(self, whole: Gradient, mean: Tensor) -> None:
        sizes = [part.numel(whole.layout) * whole.pieces[0].element_size() for part in self._parts]
        (on_host,) = to_host(mean)
        messages = self._transport.all_gather(on_host.to(whole.dtype).view(torch.uint8), sizes)
        for part, message in zip(self._parts, messages, strict=True):
            slices = part.slices(whole)
            (values,) = to_device(whole.pieces[0].device, message.view(whole.dtype))
            for piece, value in zip(slices, values.split([piece.numel() for piece in slices]), strict=True):
                piece.copy_(value)
        self.gathered = whole.numel

    def _sum_of(self, whole: Gradient) -> Tensor:
        """Memory for a part, made once: fresh memory costs more than the work on it."""
        dtype = residual_dtype(whole.dtype)
        known = self._sums.get(whole.layout)
        if known is None or known.dtype != dtype:
            names = whole.names
            self._sums = {layout: t for layout, t in self._sums.items() if names.isdisjoint(dict(layout))}
            known = self._sums[whole.layout] = torch.empty(self.part.numel(whole.layout), dtype=dtype)
        return known


@dataclass(frozen=True)
class PartialGradient(Gradient):
    """The sum over a host's ranks of one part of their gradients."""

    handed: Gradient  # what it is a part of, on this rank
    inside: Inside

    @property
    def whole(self) -> Gradient:
        return self.handed

    def own(self, names: frozenset[str]) -> frozenset[str]:
        return self.inside.part.names(names)

    def fill_(self, value: float) -> None:
        self.handed.fill_(value)

    def receive_(self, mean: Vector, kernels: Kernels) -> SparseVector | None:
        """The mean is one over hosts, of sums over their ranks; each rank shall have that over ranks."""
        ranks = self.inside.part.count
        if not isinstance(mean, SparseVector):
            self.inside.gather_(self.handed, mean / ranks, kernels)
            return None
        given, lost = rounded(mean.with_values(mean.values / ranks), self.handed.dtype)
        self.inside.gather_(self.handed, given, kernels)
        return None if lost is None else lost.with_values(lost.values * ranks)


ENDED = [0, 0, -1, 1]  # instead of what `_terms` says


def scattered(whole: Gradient, inside: Inside) -> PartialGradient:
    """This rank's part of its host's gradients. Where ranks of the host differ, nothing moves: all will refuse."""
    return inside.scatter(whole) if inside.is_common(_terms(whole)) else inside.empty(whole)


def _terms(whole: Gradient) -> list[int]:
    names, shapes, dtype = Terms(whole.layout, whole.dtype, 0, 0, "", True, None).words()[:3]
    return [names, shapes, dtype, int(refusal(whole) is not None)]
