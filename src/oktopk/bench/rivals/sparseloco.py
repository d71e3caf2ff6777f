"""SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706): the largest changes of weights, in two bits, with error feedback.

    e = decay * e + (shared - own)
    sent = the 64 largest entries of every 64 x 64 block of e, rounded to 2 bits per tensor
    e -= sent
    shared -= rate * mean of sent, at every entry over the ranks that sent it
    own = shared

Ranks go on from the shared weights: what one still owes is in nobody's weights until it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Size, Tensor

from oktopk.bench.rivals.base import end_
from oktopk.transport.base import Transport

_INDEX_BITS, _VALUE_BITS = 12, 2
_BINS = 1 << _VALUE_BITS
_RANGE = 6  # standard deviations that the bins cover


class SparseLoCo:
    """A message: four means per tensor, 2 bits per value, and 12 bits per index where not all of a block is sent."""

    levels = True

    def __init__(
        self,
        start: Tensor,
        shapes: Sequence[Size],
        transport: Transport,
        rate: float = 1.0,  # of the outer step (paper: 1)
        decay: float = 0.95,  # of what is owed, per synchronisation (paper: 0.95)
        side: int = 64,  # blocks are side x side, or `side` entries of a vector (paper: 64)
        kept: int = 64,  # largest entries of a block that are sent (paper: 64)
    ) -> None:
        self._transport, self._rate, self._decay = transport, rate, decay
        self._shared, self._owed = start.clone(), torch.zeros_like(start)
        self._blocks = Blocks(shapes, int(side), int(kept))

    def synchronize_(self, own: Tensor) -> None:
        # 1. What this rank owes.
        self._owed.mul_(self._decay).add_(self._shared).sub_(own)
        # 2. Choose and round, tensor by tensor; everyone sees everyone's message.
        message, sent = self._blocks.pack(self._owed)
        sizes = [len(message)] * self._transport.world_size
        gathered = self._transport.all_gather(torch.from_numpy(message), sizes=sizes)
        # 3. What left this rank is owed no longer; the mean of an entry is over those who sent it.
        self._owed.index_add_(0, *sent.negative)
        total, senders = torch.zeros_like(own), torch.zeros_like(own)
        for rank, other in enumerate(gathered):
            seen = sent if rank == self._transport.rank else self._blocks.unpack(other.numpy())
            total.index_add_(0, seen.places, seen.values)
            senders.index_add_(0, seen.places, torch.ones_like(seen.values))
        self._shared.sub_(total.div_(senders.clamp_(min=1)), alpha=self._rate)
        own.copy_(self._shared)

    def finish_(self, own: Tensor) -> None:
        """What is still owed is dropped, as published; only steps since the last synchronisation are averaged."""
        end_(own, self._shared, self._transport)


class Sent(NamedTuple):
    """What one rank sent."""

    places: Tensor  # int64, in the flat vector
    values: Tensor

    @property
    def negative(self) -> Sent:
        return Sent(self.places, -self.values)


class Blocks:
    """The blocks of all tensors of a flat vector, those of one width side by side: few calls, however many tensors."""

    def __init__(self, shapes: Sequence[Size], side: int, kept: int) -> None:
        self._count = len(shapes)
        by_width: dict[int, list[tuple[int, Tensor]]] = {}
        start = 0
        for number, shape in enumerate(shapes):
            blocks = blocks_of(shape, side)
            by_width.setdefault(blocks.shape[1], []).append((number, blocks + start))
            start += shape.numel()
        groups = by_width.items()
        self._groups = [torch.cat([blocks for _, blocks in group]) for _, group in groups]
        self._order = torch.cat([group.flatten() for group in self._groups])
        self._kept = [min(kept, width) for width in by_width]
        each = [torch.tensor([n for n, blocks in group for _ in blocks]) for _, group in groups]
        self._tensors = torch.cat([of.repeat_interleave(k) for of, k in zip(each, self._kept, strict=True)])

    def pack(self, vector: Tensor) -> tuple[NDArray[np.uint8], Sent]:
        """The message: codebooks, values, indices. And what it says."""
        pieces = vector[self._order].split([group.numel() for group in self._groups])
        inside = [
            _largest(piece.view(group.shape), kept)
            for piece, group, kept in zip(pieces, self._groups, self._kept, strict=True)
        ]
        places = self._in_vector(inside)
        codes, codebook = quantize(vector[places], self._tensors, self._count)
        indices = [chosen.flatten() for chosen, is_told in zip(inside, self._told, strict=True) if is_told]
        parts = [codebook.numpy().view(np.uint8), pack_bits(codes.numpy(), _VALUE_BITS)]
        parts += [pack_bits(torch.cat(indices).numpy(), _INDEX_BITS)] if indices else []
        return np.concatenate(parts), Sent(places, self._values(codes, codebook))

    def unpack(self, message: NDArray[np.uint8]) -> Sent:
        """What the message of another rank says."""
        start = 4 * _BINS * self._count
        stop = start + _packed_bytes(len(self._tensors), _VALUE_BITS)
        codebook = torch.from_numpy(message[:start].copy().view(np.float32))
        codes = torch.from_numpy(unpack_bits(message[start:stop], _VALUE_BITS, len(self._tensors)))
        counts = [len(group) * kept for group, kept in zip(self._groups, self._kept, strict=True)]
        told = [count if is_told else 0 for count, is_told in zip(counts, self._told, strict=True)]
        indices = torch.from_numpy(unpack_bits(message[stop:], _INDEX_BITS, sum(told))).split(told)
        inside = [
            read.view(len(group), kept) if len(read) else _all(group)
            for read, group, kept in zip(indices, self._groups, self._kept, strict=True)
        ]
        return Sent(self._in_vector(inside), self._values(codes, codebook))

    @property
    def _told(self) -> list[bool]:
        """Of each width, whether it has to be said which entries are sent."""
        return [kept < group.shape[1] for group, kept in zip(self._groups, self._kept, strict=True)]

    def _in_vector(self, inside: Sequence[Tensor]) -> Tensor:
        pairs = zip(self._groups, inside, strict=True)
        return torch.cat([group.gather(1, places).flatten() for group, places in pairs])

    def _values(self, codes: Tensor, codebook: Tensor) -> Tensor:
        return codebook[_BINS * self._tensors + codes]


def blocks_of(shape: Size, side: int) -> Tensor:
    """Which entries of a flat tensor each block has; int64, [blocks, entries of one].

    Sides that `side` does not divide are cut by their largest divisor below it; a tensor of more than two dimensions is
    a matrix of its first dimension against the rest.
    """
    numbers = torch.arange(shape.numel())
    if len(shape) < 2:
        return numbers.view(-1, _divisor(shape.numel(), side))
    rows, columns = shape[0], shape.numel() // shape[0]
    high, wide = _divisor(rows, side), _divisor(columns, side)
    tiles = numbers.view(rows // high, high, columns // wide, wide).transpose(1, 2)
    return tiles.reshape(-1, high * wide)


def quantize(values: Tensor, tensors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Codes of 2 bits (int64), and what each stands for in each tensor: the mean of the values in its bin.

    Four bins of 1.5 standard deviations lie at -2, -1, 0 and 1 of them from the mean of a tensor, as published.
    """
    exact = values.double()
    sizes = torch.bincount(tensors, minlength=count)
    shift = torch.bincount(tensors, exact, count) / sizes.clamp(min=1)
    away = exact - shift[tensors]
    width = _RANGE * (torch.bincount(tensors, away.square(), count) / (sizes - 1).clamp(min=1)).sqrt() / _BINS
    bins = (away / width.where(width > 0, torch.inf)[tensors] + _BINS // 2).round().clamp(0, _BINS - 1).long()
    cells = _BINS * tensors + bins
    in_each = torch.bincount(cells, minlength=_BINS * count).clamp(min=1)
    return bins, (torch.bincount(cells, exact, _BINS * count) / in_each).float()


def pack_bits(numbers: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Numbers below 2**bits, side by side."""
    flat = numbers.reshape(-1, 1).astype(np.uint16)
    return np.packbits((flat >> np.arange(bits, dtype=np.uint16) & 1).astype(np.uint8).reshape(-1))


def unpack_bits(message: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int64]:
    """What `pack_bits` has packed."""
    digits = np.unpackbits(message)[: bits * count].reshape(count, bits)
    numbers: NDArray[np.int64] = digits.dot(1 << np.arange(bits))
    return numbers


def _largest(blocks: Tensor, kept: int) -> Tensor:
    return _all(blocks) if kept >= blocks.shape[1] else blocks.abs().topk(kept, dim=1, sorted=False).indices


def _all(blocks: Tensor) -> Tensor:
    return torch.arange(blocks.shape[1]).repeat(len(blocks), 1)


def _divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, limit + 1) if number % size == 0)


def _packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)
