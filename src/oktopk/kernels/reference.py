"""The specification of every kernel, in plain torch. Runs on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.types import Difference, Source, SparseVector, index_dtype, to_dense


class ReferenceKernels:
    """Plain torch; correct everywhere, fast nowhere."""

    name = "reference"

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        # Rounded to their dtype first: a limit above what float16 can hold is infinite there.
        return all(bool((x.abs() < torch.tensor(limit, dtype=x.dtype, device=x.device)).all()) for x in pieces)

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        residual.add_(grad)
        return float(residual.double().square().sum())

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        torch.add(residual, torch.cat([piece.flatten() for piece in pieces]), out=out)
        return float(out.double().square().sum())

    def scan(self, difference: Difference, k: int = 0) -> float:
        return float(difference.to_dense().double().square().sum())

    def glance(self, difference: Difference) -> float:
        return self.scan(difference)

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        x = x.to_dense() if isinstance(x, Difference) else x
        magnitude = x.abs()
        k = min(k, int(magnitude.count_nonzero()))
        if k == 0:
            return SparseVector.empty(x.numel(), x), 0.0
        threshold = magnitude.topk(k, sorted=True).values[-1]
        above = magnitude > threshold
        # Ties at the threshold fill up what is missing, lower indices first.
        tied = (magnitude == threshold).nonzero().flatten()[: k - int(above.sum())]
        above[tied] = True
        return _gather(x, above.nonzero().flatten()), float(threshold)

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        return _gather(x, _above(x, threshold).nonzero().flatten())

    def count_above(self, x: Tensor, threshold: float) -> int:
        return int(_above(x, threshold).sum())

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        return SparseVector(indices, to_dense(x).index_select(0, indices), x.numel())

    def magnitude_histogram(self, values: Tensor, shift: int, first: int, bins: int) -> Tensor:
        # Integer bits, not logarithms: exact at the borders of bins, and the same on every device.
        bin_of = (values.abs().float().view(torch.int32).long() >> shift) - first
        inside = bin_of[(bin_of >= 0) & (bin_of < bins) & (values != 0)]
        return torch.bincount(inside, minlength=bins)

    def sum_sparse(self, vectors: Sequence[SparseVector]) -> SparseVector:
        if len(vectors) == 1:
            return vectors[0]
        indices = torch.cat([vector.indices for vector in vectors]).unique(sorted=True)
        values = vectors[0].values.new_zeros(indices.numel())
        for vector in vectors:
            values[torch.searchsorted(indices, vector.indices)] += vector.values
        return SparseVector(indices, values, vectors[0].numel)

    def common(self, vector: SparseVector, indices: Tensor) -> SparseVector:
        if indices.numel() == 0:
            return vector.at(torch.empty(0, dtype=torch.int64, device=indices.device))
        at = torch.searchsorted(indices, vector.indices).clamp_(max=indices.numel() - 1)
        return vector.at((indices[at] == vector.indices).nonzero().flatten())

    def above(self, vector: SparseVector, threshold: float, lower: float = 0.0, ties: int = 0) -> SparseVector:
        magnitude = vector.values.abs().float()
        reached = (magnitude >= threshold) & (vector.values != 0)
        tied = (~reached & (magnitude >= lower) & (vector.values != 0)).nonzero().flatten()
        reached[tied[:ties]] = True
        return vector.at(reached.nonzero().flatten())

    def largest(self, vector: SparseVector, k: int) -> tuple[SparseVector, float]:
        chosen, smallest = self.select_topk(vector.values, k)
        return vector.at(chosen.indices.long()), smallest

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        touched = sent.indices.long().unique()
        before = residual[touched].double().square().sum()
        residual.index_add_(0, sent.indices.long(), sent.values, alpha=-1)
        return float(residual[touched].double().square().sum() - before)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        before = difference.to_dense().double().square().sum()
        correction = difference.shared.new_zeros(difference.numel())
        for vector, sign in ((mean, 1), (sent, -1)):
            correction.index_add_(0, vector.indices.long(), vector.values, alpha=sign)
        difference.shared.index_add_(0, mean.indices.long(), mean.values, alpha=-1)
        touched = torch.cat([mean.indices, sent.indices]).long().unique()
        start = 0
        for piece in difference.own:
            inside = touched[(touched >= start) & (touched < start + piece.numel())]
            piece[inside - start] -= correction[inside]
            start += piece.numel()
        return float(difference.to_dense().double().square().sum() - before)

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        whole = pieces[0].new_zeros(sum(piece.numel() for piece in pieces))
        whole[vector.indices.long()] = vector.values.to(whole.dtype)
        for piece, part in zip(pieces, whole.split([piece.numel() for piece in pieces]), strict=True):
            piece.copy_(part.view(piece.shape))


def _above(x: Tensor, threshold: float) -> Tensor:
    magnitude = x.abs()
    return (magnitude >= threshold) & (magnitude > 0)


def _gather(x: Tensor, positions: Tensor) -> SparseVector:
    return SparseVector(positions.to(index_dtype(x.numel())), x[positions], x.numel())
