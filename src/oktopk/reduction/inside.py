"""What the ranks of one host do before and after hosts reduce sparsely: each sums one part, and tells what it won."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oktopk.errors import MismatchError
from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_device, to_host
from oktopk.reduction.agreement import Terms, digest, refusal, said_by_all
from oktopk.reduction.feedback import residual_dtype
from oktopk.reduction.gradient import Gradient, rounded
from oktopk.reduction.outcome import pack_outcome, unpack_outcome
from oktopk.reduction.parts import merge, parts_of
from oktopk.transport import MeteredTransport
from oktopk.transport.device_group import DeviceGroup, DeviceGroups
from oktopk.types import Reduced, SparseVector, Vector
from oktopk.wire import Wire

CHUNK = 1 << 17  # entries that are added up while they are in the second-level cache
ENDED = [0, 0, -1, 1]  # instead of what `Inside.terms` says


class Inside:
    """The ranks of one host, as many as there are parts of every parameter."""

    def __init__(self, transport: MeteredTransport, wire: Wire, devices: DeviceGroups) -> None:
        """`wire` must not round."""
        self._transport, self._wire, self._devices = transport, wire, devices
        self.parts = parts_of(transport.world_size)
        self.part = self.parts[transport.rank]
        self.gathered = 0  # how many entries came together last

    def is_common(self, words: list[int]) -> bool:
        """Whether all ranks of this host say the same. They may then scatter, and may not otherwise."""
        return all(said == words for said in self._transport.agree(words))

    def kind(self, whole: Gradient) -> str:
        """Of its device: where ranks differ in it, they go different ways to sum."""
        return self._devices.kind(whole.pieces[0].device)

    def terms(self, whole: Gradient) -> list[int]:
        """What ranks must have in common to scatter."""
        compared = Terms(whole.layout, whole.dtype, 0, 0, "", True, None, device=self.kind(whole)).words()[:3]
        return [*compared, int(refusal(whole) is not None)]

    def scatter(self, whole: Gradient) -> HostSum:
        """This rank's part of the host's gradients, whose layout, dtype and kind must be the same."""
        group = self._devices.among(whole.pieces[0].device, self._transport)
        if group is not None:
            return DeviceSum(self.part.layout(whole.layout), (self._summed(whole, group),), whole, self)
        return self._scatter_on_host(whole)

    def _scatter_on_host(self, whole: Gradient) -> PartialGradient:
        width = whole.pieces[0].element_size()
        sizes = [part.numel(whole.layout) * width if part != self.part else 0 for part in self.parts]
        messages, slices = self._transport.room(sizes), self._slices(whole)
        for part, message in zip(slices, messages, strict=True):
            if message.numel():
                torch.cat(part, out=message.view(whole.dtype))
        arrived = [other.view(whole.dtype) for _, other in self._transport.all_to_all(messages)]
        own = tuple(slices[self._transport.rank])
        return PartialGradient(self.part.layout(whole.layout), own, whole, self, tuple(arrived[1:]))

    def _slices(self, whole: Gradient) -> list[list[Tensor]]:
        """Each rank's slices of a gradient, on the host: one wait for all of them."""
        slices = [part.slices(whole) for part in self.parts]
        if whole.pieces[0].device.type == "cpu":
            return slices
        return [[part] for part in to_host(*(torch.cat(part) for part in slices))]

    # -- on devices ----------------------------------------------------------------------------------------------

    def _summed(self, whole: Gradient, group: DeviceGroup) -> Tensor:
        """This rank's part of the sum, in the precision of residuals."""
        sizes = [part.numel(whole.layout) for part in self.parts]
        rows = whole.pieces[0].new_zeros(len(sizes), max(sizes), dtype=residual_dtype(whole.dtype))
        for part, row, size in zip(self.parts, rows, sizes, strict=True):
            row[:size] = torch.cat(part.slices(whole))
        if rows.numel() == 0:
            return rows[0]
        with self._transport.elsewhere("reduce_scatter", rows[0].nbytes):
            return group.reduce_scatter(rows)[: sizes[self.part.index]]

    def _gathered_on_device(self, whole: Gradient, mean: Tensor, group: DeviceGroup) -> list[Tensor]:
        """The mean of each part."""
        sizes = [part.numel(whole.layout) for part in self.parts]
        row = whole.pieces[0].new_zeros(max(sizes))
        if row.numel() == 0:
            return [row] * len(sizes)
        row[: mean.numel()] = mean
        with self._transport.elsewhere("all_gather", row.nbytes):
            rows = group.all_gather(row)
        self._transport.agree([0])  # all have it: now who closes its reducer takes nothing away from others
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    # -- weights -------------------------------------------------------------------------------------------------

    def average_(self, whole: Gradient) -> None:
        """Replace a gradient by its mean over the ranks of this host, the same bits on each.

        Its names, sizes, dtype and kind must be the same on all of them: see `said_by_any`.
        """
        part = self.scatter(whole)
        mean = self._mean_on_host(part) if isinstance(part, PartialGradient) else part.pieces[0].div_(self.part.count)
        self._gather_dense_(whole, mean)

    def _mean_on_host(self, part: PartialGradient) -> Tensor:
        whole = part.whole
        (message,) = self._transport.room([part.numel * whole.pieces[0].element_size()])
        mean, exact = message.view(whole.dtype), residual_dtype(whole.dtype)
        total = part.total(mean if exact == whole.dtype else torch.empty(part.numel, dtype=exact))
        total.div_(self.part.count)
        if total is not mean:
            mean.copy_(total)
        return mean

    def said_by_any(self, named: Mapping[str, Tensor], said: Collection[str]) -> frozenset[str]:
        """Names of tensors, which all ranks of this host must have, on devices of one kind, that some rank says."""
        names = list(named)
        looks = [(name, x.numel(), x.dtype, self._devices.kind(x.device)) for name, x in named.items()]
        mine = [digest(repr(looks)), digest(repr(sorted(said)))]
        everyone = self._transport.agree(mine)
        if any(row[0] != mine[0] for row in everyone):
            raise MismatchError(
                "the ranks of a host do not average the same gradients or buffers: every rank of it must train the "
                "same parameters, in the same precision, on the same kind of device, and step its optimizers in the "
                "same order."
            )
        if all(row == mine for row in everyone):
            return frozenset(said)
        return frozenset(names) - said_by_all(names, frozenset(names) - frozenset(said), self._transport)

    def everyones(self, own: PartialWeights, reduced: Reduced) -> list[tuple[Gradient, Reduced]]:
        """What each rank of this host has reduced of its part. Good until ranks of the host talk again."""
        messages = self._transport.all_gather(pack_outcome(reduced, self._transport.room))
        device, outcomes = own.pieces[0].device, []
        for index, (part, message) in enumerate(zip(own.parts(), messages, strict=True)):
            mine = index == self.part.index
            outcomes.append((part, reduced if mine else unpack_outcome(message, part.numel, device)))
        means = (outcome.mean for _, outcome in outcomes)
        self.gathered = sum(mean.nnz if isinstance(mean, SparseVector) else mean.numel() for mean in means)
        return outcomes

    # -- gradients -----------------------------------------------------------------------------------------------

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
        group = self._devices.among(whole.pieces[0].device, self._transport)
        gathered = self._gathered_on_device(whole, mean, group) if group is not None else self._gathered(whole, mean)
        for part, values in zip(self.parts, gathered, strict=True):
            Gradient((), tuple(part.slices(whole))).copy_(values)
        self.gathered = whole.numel

    def _gathered(self, whole: Gradient, mean: Tensor) -> Iterator[Tensor]:
        sizes = [part.numel(whole.layout) * whole.pieces[0].element_size() for part in self.parts]
        (on_host,) = to_host(mean)
        for message in self._transport.all_gather(on_host.to(whole.dtype).view(torch.uint8), sizes):
            yield from to_device(whole.pieces[0].device, message.view(whole.dtype))


@dataclass(frozen=True)
class _Partial(Gradient):
    """One part of what the ranks of a host hold: `pieces` are this rank's share of it."""

    handed: Gradient  # what it is a part of, on this rank
    inside: Inside

    @property
    def whole(self) -> Gradient:
        return self.handed

    @property
    def is_scattered(self) -> bool:
        return True

    def own(self, names: frozenset[str]) -> frozenset[str]:
        return self.inside.part.names(names)


@dataclass(frozen=True)
class HostSum(_Partial):
    """The sum over a host's ranks of one part of their gradients."""

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


@dataclass(frozen=True)
class DeviceSum(HostSum):
    """One that is on a device: the only piece, in the precision of residuals."""

    @property
    def is_scattered(self) -> bool:
        return False


@dataclass(frozen=True)
class PartialGradient(HostSum):
    """One of which this rank has its own share in `pieces`.

    It is not made before somebody needs it, since it can be added to a residual as it is. What came from others is good
    until the ranks of the host gather.
    """

    others: tuple[Tensor, ...]  # the same part of each other rank's gradient, flat, on the host
    _total: list[Tensor] = field(default_factory=list)  # once it is made

    @property
    def is_there(self) -> bool:
        return bool(self.others)

    def zero_(self, names: Collection[str]) -> None:
        vectors = [(vector,) for vector in self._total or self.others]
        for pieces in vectors if self._total else [*vectors, self.pieces]:
            Gradient(self.layout, pieces).zero_(names)

    def join_(self, out: Tensor) -> Tensor:
        if not self._total:
            self._total.append(self.total(out))
        return self._total[0]

    def total(self, out: Tensor) -> Tensor:
        """The sum itself, made in `out`."""
        torch.cat(self.pieces, out=out)
        for other in self.others:
            out += other
        return out

    def add_to(self, out: Tensor, residual: Tensor, kernels: Kernels, k: int) -> float:
        for start in range(0, out.numel(), CHUNK):
            here = slice(start, start + CHUNK)
            torch.add(residual[here], self.others[0][here], out=out[here])
            for other in self.others[1:]:
                out[here] += other[here]
        return kernels.add(out, out, self.pieces, k)


@dataclass(frozen=True)
class PartialWeights(_Partial):
    """One part of weights that all ranks of a host have alike: this rank reduces it, and all of them move by it."""

    def parts(self) -> Sequence[Gradient]:
        return [part.gradient(self.handed) for part in self.inside.parts]

    def everyones(self, reduced: Reduced) -> Sequence[tuple[Gradient, Reduced]]:
        return self.inside.everyones(self, reduced)


def part_of_weights(whole: Gradient, inside: Inside) -> PartialWeights:
    """This rank's part. Nothing has to move for it."""
    return PartialWeights(inside.part.layout(whole.layout), tuple(inside.part.slices(whole)), whole, inside)


def scattered(whole: Gradient, inside: Inside) -> HostSum:
    """This rank's part of its host's gradients. Where ranks of the host differ, nothing moves: all will refuse."""
    return inside.scatter(whole) if inside.is_common(inside.terms(whole)) else inside.nothing_of(whole)
