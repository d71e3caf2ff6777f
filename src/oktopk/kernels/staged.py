"""Kernels for a device with memory of its own: scanned there, and what is chosen comes to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.reference import ReferenceKernels
from oktopk.kernels.staging import to_device, to_host, vector_to_device, vector_to_host
from oktopk.kernels.tensors import largest_magnitude, require_inside, require_whole, sum_of_squares
from oktopk.types import Difference, Source, SparseVector


class SparseOnHost:
    """What is done to sparse vectors, which live on the host: messages are made and summed there."""

    _host: Kernels

    def magnitude_histogram(self, values: Tensor, shift: int, first: int, bins: int) -> Tensor:
        return self._host.magnitude_histogram(values, shift, first, bins)

    def sum_sparse(self, vectors: Sequence[SparseVector]) -> SparseVector:
        return self._host.sum_sparse(vectors)

    def common(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        return self._host.common(vector, indices)

    def above(self, vector: SparseVector, threshold: float, lower: float = 0.0, ties: int = 0) -> SparseVector:
        return self._host.above(vector, threshold, lower, ties)

    def largest(self, vector: SparseVector, k: int) -> tuple[SparseVector, float]:
        return self._host.largest(vector, k)


class StagedKernels(SparseOnHost):
    """Plain torch on a device; what is chosen comes to the host.

    So all that follows a selection is the same as for gradients on the CPU, and only what was chosen, about one entry
    in a hundred, crosses over.
    """

    name = "reference"

    def __init__(self, device: torch.device, host: Kernels) -> None:
        self._device, self._host = device, host
        self._plain = ReferenceKernels()

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        return largest_magnitude(*pieces) < float(torch.tensor(limit, dtype=pieces[0].dtype))

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        residual.add_(grad)
        return sum_of_squares(residual)

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        require_whole(sum(piece.numel() for piece in pieces), residual)
        torch.add(residual, torch.cat([piece.flatten() for piece in pieces]), out=out)
        return sum_of_squares(out)

    def scan(self, difference: Difference, k: int = 0) -> float:
        return sum_of_squares(difference.to_dense())

    def glance(self, difference: Difference) -> float:
        return self.scan(difference)

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        if self._is_elsewhere(x):
            return self._host.select_topk(x, k)
        chosen, threshold = self._plain.select_topk(x, k)
        return vector_to_host(chosen), threshold

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        if self._is_elsewhere(x):
            return self._host.select_above(x, threshold)
        return vector_to_host(self._plain.select_above(x, threshold))

    def count_above(self, x: Tensor, threshold: float) -> int:
        kernels = self._host if self._is_elsewhere(x) else self._plain
        return kernels.count_above(x, threshold)

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        if self._is_elsewhere(x):
            return self._host.pick(x, indices)
        require_inside(indices, x.numel())
        (places,) = to_device(self._device, indices)
        (values,) = to_host(self._plain.pick(x, places).values)
        return SparseVector(indices, values, x.numel())

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        require_inside(sent.indices, residual.numel())
        (touched,) = to_device(self._device, sent.indices.long().unique())
        before = sum_of_squares(residual[touched])
        on_device = vector_to_device(sent, self._device)
        residual.index_add_(0, on_device.indices.long(), on_device.values, alpha=-1)
        return sum_of_squares(residual[touched]) - before

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        numel, owed = difference.numel(), sum_of_squares(difference.to_dense())
        for vector in (mean, sent):
            require_inside(vector.indices, numel)
        away, back = (vector_to_device(vector, self._device) for vector in (mean, sent))
        correction = difference.shared.new_zeros(numel)
        correction.index_add_(0, away.indices.long(), away.values, alpha=-1)
        difference.shared.add_(correction)
        correction.index_add_(0, back.indices.long(), back.values)
        for piece, part in zip(difference.own, correction.split([p.numel() for p in difference.own]), strict=True):
            piece.add_(part.view(piece.shape))
        return sum_of_squares(difference.to_dense()) - owed

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        require_inside(vector.indices, sum(piece.numel() for piece in pieces))
        self._plain.fill_(pieces, vector_to_device(vector, self._device))

    def _is_elsewhere(self, x: Source) -> bool:
        """Whether x is the values of a sparse vector, and so on the host."""
        return x.device.type != self._device.type
