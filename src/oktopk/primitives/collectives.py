"""Exchanges that several algorithms share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_device, to_host
from oktopk.primitives.likely import Guess
from oktopk.primitives.partition import Regions, equal_bounds, join, split
from oktopk.primitives.selection import slack
from oktopk.transport.base import Transport
from oktopk.types import Difference, Source, SparseVector
from oktopk.wire import Packed, Wire


@dataclass(frozen=True)
class Tools:
    """What an algorithm works with."""

    transport: Transport
    wire: Wire
    exact: Wire  # for messages that must not be rounded
    kernels: Kernels
    over_senders: bool = False  # the mean of an entry is over the ranks that sent it, not over all

    @property
    def is_rounding(self) -> bool:
        """Whether values change on the wire."""
        return self.wire.values != "float32"

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def rank(self) -> int:
        return self.transport.rank

    def largest(self, acc: Source, k: int) -> tuple[SparseVector, float]:
        """The k largest entries and the smallest magnitude of them, unless they were chosen beforehand."""
        if isinstance(acc, Difference) and acc.largest is not None:
            return acc.largest
        chosen: tuple[SparseVector, float] = self.kernels.select_topk(acc, k)
        return chosen

    def pick(self, acc: Source, indices: Tensor) -> SparseVector:
        """The entries at these indices, unless they were picked beforehand."""
        if isinstance(acc, Difference) and acc.picked is not None:
            return acc.picked
        picked: SparseVector = self.kernels.pick(acc, indices)
        return picked

    def limits(self, counts: Sequence[int] | None, numel: int, dtype: torch.dtype) -> list[int] | None:
        """The longest message each rank can send when it has `counts` entries of vectors of up to `numel`."""
        return None if counts is None else [self.wire.limit(count, numel, dtype) for count in counts]


def reduce_all_(values: Tensor, tools: Tools) -> tuple[Tensor, Tensor | None]:
    """The mean over ranks of all values, and what was sent of them: None if it is all, and then they do not survive.

    With a rounding wire each rank sums one region and hands it on, so that rounding errors have an owner to stay with;
    otherwise this is the backend's own all-reduce.
    """
    if tools.world_size > 1 and values.device.type != "cpu":
        return _reduce_all_of_device_(values, tools)
    if not tools.is_rounding or tools.world_size == 1:
        # Divided before the sum, as DDP does, so that the bits are DDP's.
        return tools.transport.all_reduce_(values.div_(tools.world_size)), None
    return _reduce_regions(values, tools)


def _reduce_regions(values: Tensor, tools: Tools) -> tuple[Tensor, Tensor]:
    """The mean over ranks of all values, each region of which one rank sums; and what was sent of them."""
    bounds = equal_bounds(values.numel(), tools.world_size)
    sizes = [high - low for low, high in pairwise(bounds)]
    parts, mine = values.split(sizes), slice(bounds[tools.rank], bounds[tools.rank + 1])
    nothing = Packed(torch.empty(0, dtype=torch.uint8), parts[tools.rank])
    packed = [nothing if rank == tools.rank else tools.wire.pack_all(part) for rank, part in enumerate(parts)]
    limits = tools.limits([max(sizes)] * tools.world_size, values.numel(), values.dtype)
    total = parts[tools.rank]
    # In the order of distance, whatever arrived first: the bits of a sum depend on its order.
    for source, message in tools.transport.all_to_all([one.message for one in packed], tools.world_size, limits):
        if source != tools.rank:
            total = total + tools.wire.unpack_all(message)
    told = tools.wire.pack_all(total)
    messages = tools.transport.all_gather(told.message, limits=tools.limits(sizes, values.numel(), values.dtype))
    totals = [told.values if rank == tools.rank else tools.wire.unpack_all(m) for rank, m in enumerate(messages)]
    sent = torch.cat([one.values for one in packed])
    sent[mine] -= total - told.values  # what rounding took from the sums stays with who summed them
    return torch.cat(totals).div_(tools.world_size), sent


def _reduce_all_of_device_(values: Tensor, tools: Tools) -> tuple[Tensor, Tensor | None]:
    """By way of the host."""
    (on_host,) = to_host(values)
    mean, sent = reduce_all_(on_host, tools)
    if sent is None:
        return values.copy_(mean, non_blocking=True), None
    mean, sent = to_device(values.device, mean, sent)
    return mean, sent


def reduce_at(acc: Source, indices: Tensor, tools: Tools) -> tuple[SparseVector, SparseVector]:
    """The mean over ranks at indices that are the same on all of them; and what was sent of the own entries."""
    own = tools.pick(acc, indices)
    survive = tools.is_rounding and tools.world_size > 1
    mean, sent = reduce_all_(own.values if survive else own.values.clone(), tools)
    return own.with_values(mean), own if sent is None else own.with_values(sent)


def split_and_reduce(
    chosen: SparseVector, regions: Regions, in_flight: int, tools: Tools
) -> tuple[SparseVector, Tensor]:
    """Send every chosen pair to the owner of its region; the sum over ranks in the own region, and what was sent.

    The second result is `chosen.values` as their receivers see them. The own part is not rounded: it does not travel.
    """
    bounds = regions.bounds
    parts = split(chosen, bounds)
    own = parts[tools.rank]
    packed = [None if part is own else tools.wire.pack(part) for part in parts]
    nothing = torch.empty(0, dtype=torch.uint8)
    received = [own]
    messages = [p.message if p else nothing for p in packed]
    limits = tools.limits(regions.counts, chosen.numel, chosen.values.dtype)
    for source, message in tools.transport.all_to_all(messages, in_flight, limits):
        if source != tools.rank:
            received.append(tools.wire.unpack(message))
    # In the order of distance, whatever arrived first: the bits of a sum depend on its order.
    region = tools.kernels.sum_sparse(received)
    sent = torch.cat([part.values if p is None else p.values for part, p in zip(parts, packed, strict=True)])
    return region, sent


class Everyone(NamedTuple):
    """What all ranks sent to all."""

    total: SparseVector  # the sum, in the order of ranks
    sent: SparseVector  # the own vector, as the others saw it
    senders: Tensor | int  # how many ranks the mean of each entry is over


def gather_vectors(chosen: SparseVector, most: int, tools: Tools) -> Everyone:
    """Everyone's vector. No rank chose more than `most` entries."""
    packed = tools.wire.pack(chosen)
    sent = chosen.with_values(packed.values)
    limits = tools.limits([most] * tools.world_size, chosen.numel, chosen.values.dtype)
    messages = tools.transport.all_gather(packed.message, limits=limits)
    vectors = [sent if rank == tools.rank else tools.wire.unpack(message) for rank, message in enumerate(messages)]
    total = tools.kernels.sum_sparse(vectors)
    return Everyone(total, sent, _senders(vectors, tools) if tools.over_senders else tools.world_size)


def _senders(vectors: Sequence[SparseVector], tools: Tools) -> Tensor:
    """How many ranks sent something at each entry of their sum; 1 where rounding left nothing of it."""
    ones = [vector.with_values(vector.values.ne(0).to(vector.values.dtype)) for vector in vectors]
    return tools.kernels.sum_sparse(ones).values.clamp_(min=1)


class Gathered(NamedTuple):
    """What all ranks told."""

    total: SparseVector
    lost: SparseVector  # what rounding took from the own block
    sizes: list[int]  # of each rank's block


def gather_regions(
    block: SparseVector,
    bounds: Sequence[int],
    tools: Tools,
    balance_factor: float = inf,
    counts: Sequence[int] | None = None,
) -> Gathered:
    """Everyone's block as one vector.

    When the largest block exceeds `balance_factor` times the mean, the blocks are evened out before they are gathered.
    Saves a round when all know the `counts` of entries in each block already.
    """
    packed = tools.wire.pack(block)
    sizes = None
    if counts is None:
        announced = tools.transport.agree([block.nnz, packed.message.numel()])
        counts, sizes = [row[0] for row in announced], [row[1] for row in announced]
    if max(counts) * tools.world_size > balance_factor * sum(counts):
        even, whole = even_out(block, counts, bounds, tools), [0] * tools.world_size + [bounds[-1]]
        return gather_regions(even, whole, tools, counts=[b - a for a, b in pairwise(_shares(counts))])
    messages = tools.transport.all_gather(packed.message, sizes, tools.limits(counts, bounds[-1], block.values.dtype))
    return _joined(block, packed, messages, bounds, tools)


class Told(NamedTuple):
    """What all ranks told before the global threshold was known."""

    gathered: Gathered
    block: SparseVector  # what this rank told
    reached: int  # how many sums reached the guess
    more: int  # how many sums were not told

    def missing(self, k: int) -> int:
        """How many entries must still come; 0 if about k are there, or there are no others."""
        came = self.gathered.total.nnz
        return 0 if self.more == 0 or came >= k - slack(k) else k - came


def tell_above(region: SparseVector, guess: Guess, bounds: Sequence[int], tools: Tools) -> Told:
    """Gather what reaches a guessed threshold, in one round. A rank that has more than its room tells the largest."""
    above = tools.kernels.above(region, guess.threshold)
    block = _largest_of(above, guess.room[tools.rank], tools.kernels)
    packed = tools.wire.pack(block)
    counts = torch.tensor([above.nnz, region.nnz - block.nnz]).view(torch.uint8)
    limits = [counts.numel() + tools.wire.limit(most, bounds[-1], region.values.dtype) for most in guess.room]
    messages = tools.transport.all_gather(torch.cat([counts, packed.message]), limits=limits)
    notes = torch.stack([message[: counts.numel()].view(torch.int64) for message in messages])
    gathered = _joined(block, packed, [message[counts.numel() :] for message in messages], bounds, tools)
    return Told(gathered, block, *notes.sum(0).tolist())


def nothing_told(region: SparseVector, bounds: Sequence[int], tools: Tools) -> Told:
    """As `tell_above`, when nothing can be guessed."""
    block, nothing = (SparseVector.empty(numel, region.values) for numel in (region.numel, bounds[-1]))
    return Told(Gathered(nothing, nothing, [0] * tools.world_size), block, 0, bounds[-1])


def _largest_of(vector: SparseVector, most: int, kernels: Kernels) -> SparseVector:
    return vector if vector.nnz <= most else kernels.largest(vector, most)[0]


def both(first: Gathered, second: Gathered, tools: Tools) -> Gathered:
    """What was told in two parts, which have no index in common."""
    sizes = [one + other for one, other in zip(first.sizes, second.sizes, strict=True)]
    add = tools.kernels.sum_sparse
    return Gathered(add([first.total, second.total]), add([first.lost, second.lost]), sizes)


def cut(gathered: Gathered, k: int, kernels: Kernels) -> tuple[Gathered, float]:
    """Drop all but the k largest entries, if there are clearly more; and the smallest magnitude of k that are there."""
    total, lost, sizes = gathered
    largest, smallest = kernels.largest(total, k)
    if total.nnz <= k + slack(k):
        return gathered, smallest
    return Gathered(largest, kernels.common(lost, largest.indices), sizes), smallest


def _joined(
    block: SparseVector, packed: Packed, messages: Sequence[Tensor], bounds: Sequence[int], tools: Tools
) -> Gathered:
    blocks = [
        block.with_values(packed.values) if rank == tools.rank else tools.wire.unpack(message)
        for rank, message in enumerate(messages)
    ]
    lost = SparseVector.empty(bounds[-1], block.values)
    if packed.values is not block.values:  # what loses nothing comes back as it is
        lost = SparseVector(block.indices + bounds[tools.rank], block.values - packed.values, bounds[-1])
    return Gathered(join(blocks, bounds), lost, [part.nnz for part in blocks])


def even_out(block: SparseVector, sizes: Sequence[int], bounds: Sequence[int], tools: Tools) -> SparseVector:
    """Move entries between ranks until all blocks are equally long; the new block, with indices that count from 0.

    Blocks stay in the order of indices.
    """
    start = sum(sizes[: tools.rank])
    low, numel = bounds[tools.rank], bounds[-1]
    cuts = [min(max(share - start, 0), block.nnz) for share in _shares(sizes)]
    moved = [
        tools.exact.pack(SparseVector(block.indices[a:b] + low, block.values[a:b], numel)).message
        for a, b in pairwise(cuts)
    ]
    pieces: dict[int, SparseVector] = {}
    for source, message in tools.transport.all_to_all(moved):
        pieces[source] = tools.exact.unpack(message)
    return join([pieces[rank] for rank in range(tools.world_size)], [0] * tools.world_size + [numel])


def _shares(sizes: Sequence[int]) -> list[int]:
    """Where each rank's equal share of all entries begins, and where the last ends."""
    return [sum(sizes) * rank // len(sizes) for rank in range(len(sizes) + 1)]
