"""The nouns of the library."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseVector:
    """Some coordinates of a flat vector of `numel` entries; every other entry is zero."""

    indices: Tensor  # int32 or int64, [nnz], ascending
    values: Tensor  # floating, [nnz]
    numel: int

    @property
    def nnz(self) -> int:
        return self.indices.numel()

    def to_dense(self) -> Tensor:
        """The whole vector, zeros included."""
        return self.values.new_zeros(self.numel).index_add_(0, self.indices.long(), self.values)

    def with_values(self, values: Tensor) -> SparseVector:
        return SparseVector(self.indices, values, self.numel)

    def at(self, positions: Tensor) -> SparseVector:
        """The entries at these positions of the index list."""
        return SparseVector(self.indices[positions], self.values[positions], self.numel)

    @staticmethod
    def empty(numel: int, like: Tensor) -> SparseVector:
        """No coordinates at all, with the dtype and device of `like`."""
        indices = torch.empty(0, dtype=index_dtype(numel), device=like.device)
        return SparseVector(indices, like.new_empty(0), numel)


Vector = Tensor | SparseVector  # a flat vector, dense or sparse


@dataclass
class Difference:
    """The flat vector shared - own, which is never formed: `own` lies in pieces, and both stay where they are."""

    shared: Tensor  # flat
    own: tuple[Tensor, ...]  # flat, of the same dtype, together as long as `shared`
    largest: tuple[SparseVector, float] | None = None  # entries chosen beforehand, and the smallest magnitude of them
    picked: SparseVector | None = None  # entries drawn beforehand

    def numel(self) -> int:
        return self.shared.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.shared.dtype

    @property
    def device(self) -> torch.device:
        return self.shared.device

    def to_dense(self) -> Tensor:
        return self.shared - torch.cat(self.own)


Source = Tensor | Difference  # what an algorithm reduces


@dataclass(frozen=True)
class Stats:
    """What an algorithm observed during one reduction."""

    selected_local: int
    selected_global: int
    threshold_local: float = 0.0
    threshold_global: float = 0.0
    imbalance: float = 1.0  # largest block over the mean block


@dataclass(frozen=True)
class Reduced:
    """The result of one reduction on one rank.

    `mean` is the same on every rank, bit for bit. `sent` is what left this rank for good: `input - sent` is what it
    still owes, so that over all ranks `sum(input) == world_size * mean + sum(input - sent)`, or with
    means over those who sent an entry their number in the place of `world_size`. A sparse `sent` may name an index
    twice; its values then add up. None means that everything was sent.
    """

    mean: Vector
    sent: Vector | None
    stats: Stats = field(default=Stats(0, 0), repr=False)


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest dtype that can name every entry of a vector of `numel` entries."""
    return torch.int32 if numel <= 2**31 - 1 else torch.int64


def to_dense(vector: Vector | Source) -> Tensor:
    return vector if isinstance(vector, Tensor) else vector.to_dense()
