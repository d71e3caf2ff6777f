"""Values of 4 and 2 bits: a sign, and one of a few levels between two magnitudes that a block shares.

In plain torch, so that it runs on any device; `compiled_narrow` has the same as compiled loops.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oktopk.wire.backend import Loops

BLOCK = 128  # values that share two magnitudes

# Where the levels of a block lie, from its lower magnitude to its upper one, by bits of a code. What is selected piles
# up at the threshold and thins out above it, so levels are denser there.
LEVELS = {4: tuple((code / 7) ** 1.5 for code in range(8)), 2: (0.0, 1.0)}
MIDDLES = {bits: tuple((a + b) / 2 for a, b in pairwise(levels)) for bits, levels in LEVELS.items()}
MOVES = 2  # how often two means are moved to the middle of what is nearest to them; more = hardly better

_LIMIT = torch.finfo(torch.bfloat16).max
_LIMIT_BITS = np.uint32(0x7F7F0000)  # the same, as float32


def nbytes(bits: int, count: int) -> int:
    """Two bfloat16 for each block, then the codes."""
    return 4 * -(-count // BLOCK) + -(-bits * count // 8)


def encode(values: Tensor, bits: int) -> Tensor:
    """float32 or float64 values as bytes."""
    count, blocks = values.numel(), -(-values.numel() // BLOCK)
    magnitudes = _blocks(values.abs())
    inside = (torch.arange(blocks * BLOCK, device=values.device) < count).view(-1, BLOCK)
    ends = _ends(magnitudes.double().clamp(max=_LIMIT), inside, with_means=bits == 2).float().to(torch.bfloat16)
    codes = _blocks(values.signbit()).to(torch.uint8) << (bits - 1)
    for border in _between(ends, MIDDLES[bits], values.dtype).unbind(1):
        codes += magnitudes > border[:, None]
    return torch.cat([ends.view(-1).view(torch.uint8), _joined(codes.view(-1)[:count], bits)])


def decode(data: Tensor, bits: int, count: int, dtype: torch.dtype) -> Tensor:
    """The values in `data`, which has exactly `nbytes(bits, count)` bytes."""
    head = 4 * -(-count // BLOCK)
    levels = _between(data[:head].clone().view(torch.bfloat16).view(-1, 2), LEVELS[bits], dtype)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    codes = ((data[head:, None] >> shifts) & (2**bits - 1)).view(-1)[:count].long()
    half = len(LEVELS[bits])
    block = torch.arange(count, device=data.device) // BLOCK
    magnitudes = levels.view(-1)[block * half + codes % half]
    return torch.where(codes < half, magnitudes, -magnitudes)


def encode_compiled(values: np.ndarray, bits: int, loops: Loops, data: np.ndarray, seen: np.ndarray) -> None:
    """As `encode` for float32, into `data`; and as they come back to `seen`."""
    head = 4 * -(-values.size // BLOCK)
    ends = data[:head].view(np.uint16).reshape(-1, 2)
    tables = np.array(LEVELS[bits], np.float32), np.array(MIDDLES[bits], np.float32)
    scratch = np.empty(3 * BLOCK, np.float64), np.empty(BLOCK, np.uint32), *(np.empty_like(table) for table in tables)
    loops.encode_narrow(values, BLOCK, bits, _LIMIT_BITS, MOVES, *tables, ends, data[head:], seen, *scratch)


def decode_compiled(data: np.ndarray, bits: int, loops: Loops, values: np.ndarray) -> None:
    """As `decode` for float32, into `values`."""
    levels = np.array(LEVELS[bits], np.float32)
    loops.decode_narrow(data, BLOCK, bits, levels, values, np.empty_like(levels), np.empty(2 * levels.size, np.float32))


def _blocks(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _ends(magnitudes: Tensor, inside: Tensor, with_means: bool) -> Tensor:
    """[blocks, 2]: the smallest and the largest of each block, or the means of its smaller and its larger ones."""
    low, high = magnitudes.where(inside, torch.inf).amin(1), magnitudes.amax(1)
    if with_means:
        # Few are large: the first border is a quarter of the way up.
        border = low + (high - low) * 0.25
        for _ in range(MOVES + 1):
            large = magnitudes > border[:, None]
            low, high = _mean(magnitudes, inside & ~large, low), _mean(magnitudes, inside & large, high)
            border = (low + high) * 0.5
    return torch.stack([low, high], 1)


def _mean(magnitudes: Tensor, of: Tensor, otherwise: Tensor) -> Tensor:
    """Per block; added in halves, so that the compiled loops, in the same order, get the same bits."""
    total, count = magnitudes.where(of, 0.0), of.sum(1)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return torch.where(count > 0, total[:, 0] / count.clamp(min=1), otherwise)


def _between(ends: Tensor, shares: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """[blocks, shares]: so far on the way from the lower end to the upper one."""
    low, high = ends.to(dtype).unbind(1)
    return low[:, None] + (high - low)[:, None] * torch.tensor(shares, dtype=dtype, device=ends.device)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits as bytes, the first one lowest."""
    per_byte = 8 // bits
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    joined = rows[:, 0].clone()
    for i in range(1, per_byte):
        joined |= rows[:, i] << (bits * i)
    return joined
