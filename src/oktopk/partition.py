"""Who owns which slice of the flat gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.transport.base import Transport
from oktopk.types import SparseVector, index_dtype


def equal_bounds(numel: int, world_size: int) -> list[int]:
    """Borders of `world_size` regions of equal length; some are empty when numel < world_size."""
    return [numel * rank // world_size for rank in range(world_size + 1)]


def balanced_bounds(chosen: Tensor, numel: int, transport: Transport) -> list[int]:
    """Region borders that give each rank about the same number of chosen coordinates.

    Each rank proposes the quantiles of its own choice; the mean of the proposals is what all agree on. A rank that
    chose nothing has no say.
    """
    world_size, nnz = transport.world_size, chosen.numel()
    # int64 throughout: a sum of borders over ranks passes 2**31 long before numel does.
    proposal = torch.zeros(world_size, dtype=torch.int64, device=chosen.device)
    if nnz:
        quantiles = torch.tensor([nnz * rank // world_size for rank in range(1, world_size)], dtype=torch.int64)
        proposal[:-1] = chosen[quantiles.to(chosen.device)]
        proposal[-1] = 1
    *borders, voters = transport.all_reduce_(proposal.to(transport.device)).tolist()
    if voters == 0:
        return equal_bounds(numel, world_size)
    return [0, *(border // voters for border in borders), numel]


def split(vector: SparseVector, bounds: Sequence[int]) -> list[SparseVector]:
    """The part of `vector` in each region, with indices that count from the region's start."""
    inner = torch.tensor(bounds[1:-1], dtype=vector.indices.dtype, device=vector.indices.device)
    cuts = [0, *torch.searchsorted(vector.indices, inner).tolist(), vector.nnz]
    return [
        SparseVector(vector.indices[start:end] - low, vector.values[start:end], high - low)
        for start, end, low, high in zip(cuts, cuts[1:], bounds, bounds[1:], strict=False)
    ]


def join(parts: Sequence[SparseVector], bounds: Sequence[int]) -> SparseVector:
    """The inverse of `split`."""
    dtype = index_dtype(bounds[-1])
    indices = torch.cat([part.indices.to(dtype) + low for part, low in zip(parts, bounds, strict=False)])
    return SparseVector(indices, torch.cat([part.values for part in parts]), bounds[-1])
