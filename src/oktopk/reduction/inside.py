"""What the ranks of one host do before and after hosts reduce sparsely: each sums one part, and tells what it won."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_device, to_host
from oktopk.reduction.agreement import Terms, refusal
from oktopk.reduction.gradient import Gradient, rounded
from oktopk.reduction.parts import Part, merge
from oktopk.transport import MeteredTransport
from oktopk.types import SparseVector, Vector
from oktopk.wire import Wire

CHUNK = 1 << 17  # entries that are added up while they are in the second-level cache
ENDED = [0, 0, -1, 1]  # instead of what `_terms` says


class Inside:
    """The ranks of one host, as many as there are parts of every parameter."""

    def __init__(self, transport: MeteredTransport, wire: Wire) -> None:
        """`wire` must not round."""
        self._transport, self._wire = transport, wire
        self._parts = [Part(index, transport.world_size) for index in range(transport.world_size)]
        self.part = self._parts[transport.rank]
        self.gathered = 0  # how many entries came together last

    def is_common(self, words: list[int]) -> bool:
        """Whether all ranks of this host say the same. They may then scatter, and may not otherwise."""
        return all(said == words for said in self._transport.agree(words))

    def scatter(self, whole: Gradient) -> PartialGradient:
        """This rank's part of the host's gradients, whose layout and dtype must be the same."""
        width = whole.pieces[0].element_size()
        sizes = [part.numel(whole.layout) * width if part != self.part else 0 for part in self._parts]
        messages, slices = self._transport.room(sizes), self._slices(whole)
        for part, message in zip(slices, messages, strict=True):
            if message.numel():
                torch.cat(part, out=message.view(whole.dtype))
        arrived = [other.view(whole.dtype) for _, other in self._transport.all_to_all(messages)]
        own = tuple(slices[self._transport.rank])
        return PartialGradient(self.part.layout(whole.layout), own, whole, self, tuple(arrived[1:]))

    def _slices(self, whole: Gradient) -> list[list[Tensor]]:
        """Each rank's slices of a gradient, on the host: one wait for all of them."""
        slices = [part.slices(whole) for part in self._parts]
        if whole.pieces[0].device.type == "cpu":
            return slices
        return [[part] for part in to_host(*(torch.cat(part) for part in slices))]

    def nothing_of(self, whole: Gradient) -> PartialGradient:
        """What stands for a gradient of which nothing was scattered."""
        zeros = torch.zeros(self.part.numel(whole.layout))
        return PartialGradient(self.part.layout(whole.layout), (zeros,), whole, self, ())

    def gather_(self, whole: Gradient, mean: Vector, kernels: Kernels) -> None:
        """Replace a gradient by the means of all parts, of which this rank has one."""
        if isinstance(mean, SparseVector):
            self._gather_sparse_(whole, mean, kernels)
        else:
            self._gather_dense_(whole, mean)

    def _gather_sparse_(self, whole: Gradient, mean: SparseVector, kernels: Kernels) -> None:
        messages = self._transport.all_gather(self._wire.pack(mean).message)
        together = merge([self._wire.unpack(message) for message in messages], whole.layout)
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


@dataclass(frozen=True)
class PartialGradient(Gradient):
    """The sum over a host's ranks of one part of their gradients: `pieces` are this rank's share of it.

    It is not made before somebody needs it, since it can be added to a residual as it is. What came from others is good
    until the ranks of the host gather.
    """

    handed: Gradient  # what it is a part of, on this rank
    inside: Inside
    others: tuple[Tensor, ...]  # the same part of each other rank's gradient, flat, on the host
    _total: list[Tensor] = field(default_factory=list)  # once it is made

    @property
    def whole(self) -> Gradient:
        return self.handed

    @property
    def is_scattered(self) -> bool:
        return True

    def own(self, names: frozenset[str]) -> frozenset[str]:
        return self.inside.part.names(names)

    @property
    def is_there(self) -> bool:
        return bool(self.others)

    def zero_(self, names: Collection[str]) -> None:
        vectors = [(vector,) for vector in self._total or self.others]
        for pieces in vectors if self._total else [*vectors, self.pieces]:
            Gradient(self.layout, pieces).zero_(names)

    def fill_(self, value: float) -> None:
        self.handed.fill_(value)

    def join_(self, out: Tensor) -> Tensor:
        if not self._total:
            self._total.append(torch.cat(self.pieces, out=out))
            for other in self.others:
                out += other
        return self._total[0]

    def add_to(self, out: Tensor, residual: Tensor, kernels: Kernels, k: int) -> float:
        for start in range(0, out.numel(), CHUNK):
            here = slice(start, start + CHUNK)
            torch.add(residual[here], self.others[0][here], out=out[here])
            for other in self.others[1:]:
                out[here] += other[here]
        return kernels.add(out, out, self.pieces, k)

    def receive_(self, mean: Vector, kernels: Kernels) -> SparseVector | None:
        """The mean is one over hosts, of sums over their ranks; each rank shall have that over ranks."""
        ranks = self.inside.part.count
        if not isinstance(mean, SparseVector):
            self.inside.gather_(self.handed, mean / ranks, kernels)
            return None
        given, lost = rounded(mean.with_values(mean.values / ranks), self.handed.dtype)
        self.inside.gather_(self.handed, given, kernels)
        return None if lost is None else lost.with_values(lost.values * ranks)


def scattered(whole: Gradient, inside: Inside) -> PartialGradient:
    """This rank's part of its host's gradients. Where ranks of the host differ, nothing moves: all will refuse."""
    return inside.scatter(whole) if inside.is_common(_terms(whole)) else inside.nothing_of(whole)


def _terms(whole: Gradient) -> list[int]:
    names, shapes, dtype = Terms(whole.layout, whole.dtype, 0, 0, "", True, None).words()[:3]
    return [names, shapes, dtype, int(refusal(whole) is not None)]
