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
    """Messages hold four means per tensor, 2 bits per value, and 12 bits per index where not all of a block is sent."""

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
        self._transport, self._rate, self._decay, self._kept = transport, rate, decay, int(kept)
        self._shared, self._owed = start.clone(), torch.zeros_like(start)
        self._blocks = [blocks_of(shape, int(side)) for shape in shapes]
        self._sizes = [shape.numel() for shape in shapes]

    def synchronize_(self, own: Tensor) -> None:
        # 1. What this rank owes.
        self._owed.mul_(self._decay).add_(self._shared - own)
        # 2. Choose and round tensor by tensor; everyone sees everyone's message.
        parts = self._owed.split(self._sizes)
        message = np.concatenate(
            [pack(part[blocks], self._kept) for part, blocks in zip(parts, self._blocks, strict=True)]
        )
        gathered = self._transport.all_gather(
            torch.from_numpy(message), sizes=[len(message)] * self._transport.world_size
        )
        sent = [self._unpacked(other.numpy()) for other in gathered]
        # 3. What left this rank is owed no longer; the mean of an entry is over those who sent it.
        self._owed.sub_(sent[self._transport.rank][0])
        total, senders = (torch.stack(column).sum(0) for column in zip(*sent, strict=True))
        self._shared.sub_(total / senders.clamp(min=1), alpha=self._rate)
        own.copy_(self._shared)

    def finish_(self, own: Tensor) -> None:
        """What is still owed is dropped, as published; only steps since the last synchronisation are averaged."""
        end_(own, self._shared, self._transport)

    def _unpacked(self, message: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        """What a rank sent, as one vector, and 1 where it sent something."""
        values, where = torch.zeros_like(self._owed), torch.zeros_like(self._owed)
        start = 0
        tensors = zip(values.split(self._sizes), where.split(self._sizes), self._blocks, strict=True)
        for part, mask, blocks in tensors:
            stop = start + message_bytes(blocks, self._kept)
            places, seen = unpack(message[start:stop], blocks.shape, self._kept)
            chosen = blocks.gather(1, places)
            part[chosen], mask[chosen] = seen, 1.0
            start = stop
        return values, where


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


def pack(blocks: Tensor, kept: int) -> NDArray[np.uint8]:
    """The largest entries of every block (a row), rounded: codebook, values, indices."""
    places = _largest(blocks, kept)
    codes, codebook = quantize(blocks.gather(1, places))
    parts = [codebook.numpy().view(np.uint8), pack_bits(codes.numpy(), _VALUE_BITS)]
    if places.shape[1] < blocks.shape[1]:
        parts.append(pack_bits(places.numpy(), _INDEX_BITS))
    return np.concatenate(parts)


def unpack(message: NDArray[np.uint8], shape: Sequence[int], kept: int) -> tuple[Tensor, Tensor]:
    """The places in every block that were sent, and their values; both [blocks, kept]."""
    rows, width = shape
    each = min(kept, width)
    count, start = rows * each, 4 * _BINS
    stop = start + _packed_bytes(count, _VALUE_BITS)
    codebook = torch.from_numpy(message[:start].copy().view(np.float32))
    codes = torch.from_numpy(unpack_bits(message[start:stop], _VALUE_BITS, count))
    places = torch.arange(width).repeat(rows, 1)
    if each < width:
        places = torch.from_numpy(unpack_bits(message[stop:], _INDEX_BITS, count)).view(rows, each)
    return places, codebook[codes].view(rows, each)


def message_bytes(blocks: Tensor, kept: int) -> int:
    """The length of what `pack` makes of one tensor."""
    rows, width = blocks.shape
    count = rows * min(kept, width)
    indices = _packed_bytes(count, _INDEX_BITS) if kept < width else 0
    return 4 * _BINS + _packed_bytes(count, _VALUE_BITS) + indices


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 2 bits (int64), and what each stands for: the mean of the values in its bin.

    Four bins of 1.5 standard deviations lie at -2, -1, 0 and 1 of them from the mean, as published.
    """
    shift = values.mean()
    width = _RANGE * (values - shift).norm() / max(1, values.numel() - 1) ** 0.5 / _BINS
    places = (values - shift) / width if float(width) > 0 else torch.zeros_like(values)
    codes = (places + _BINS // 2).round().clamp(0, _BINS - 1).long()
    counts = torch.bincount(codes.flatten(), minlength=_BINS).clamp(min=1)
    sums = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, codes.flatten(), values.flatten().double())
    return codes, (sums / counts).float()


def pack_bits(numbers: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Numbers below 2**bits, side by side."""
    flat = numbers.reshape(-1, 1).astype(np.int64)
    return np.packbits((flat >> np.arange(bits) & 1).astype(np.uint8).reshape(-1))


def unpack_bits(message: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.int64]:
    """What `pack_bits` has packed."""
    digits = np.unpackbits(message)[: bits * count].reshape(count, bits).astype(np.int64)
    numbers: NDArray[np.int64] = (digits << np.arange(bits)).sum(axis=1)
    return numbers


def _largest(blocks: Tensor, kept: int) -> Tensor:
    if kept >= blocks.shape[1]:
        return torch.arange(blocks.shape[1]).repeat(len(blocks), 1)
    return blocks.abs().topk(kept, dim=1).indices


def _divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, limit + 1) if number % size == 0)


def _packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)
