"""Kernels of a device, for tests that know tensors of the host only: each of these has a mirror there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.kernels import Kernels
from oktopk.types import Difference, Source, SparseVector


class MirroredKernels:
    """Calls kernels with mirrors of its arguments, and brings back what they have written.

    A mirror stays the same as long as its original does, so that what kernels remember of a vector is tried too.
    """

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self.name, self._kernels, self._device = kernels.name, kernels, device
        self._mirrors: dict[int, tuple[Tensor, int]] = {}  # by id of the original, with its version then
        self._differences: dict[int, Difference] = {}

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        return self._kernels.all_below([self._of(piece) for piece in pieces], limit)

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        return self._written(self._kernels.accumulate_(self._of(residual), self._of(grad), k), residual)

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        mirrors = [self._of(piece) for piece in pieces]
        return self._written(self._kernels.add(self._of(out), self._of(residual), mirrors, k), out)

    def scan(self, difference: Difference, k: int = 0) -> float:
        return self._kernels.scan(self._difference(difference), k)

    def glance(self, difference: Difference) -> float:
        return self._kernels.glance(self._difference(difference))

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        return self._kernels.select_topk(self._source(x), k)

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        return self._kernels.select_above(self._of(x), threshold)

    def count_above(self, x: Tensor, threshold: float) -> int:
        return self._kernels.count_above(self._of(x), threshold)

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        return self._kernels.pick(self._source(x), indices)

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        return self._written(self._kernels.retain_(self._of(residual), sent), residual)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        change = self._kernels.move_(self._difference(difference), mean, sent)
        return self._written(change, difference.shared, *difference.own)

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        self._written(self._kernels.fill_([self._of(piece) for piece in pieces], vector), *pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)  # those of sparse vectors, which are on the host

    def _of(self, x: Tensor) -> Tensor:
        known = self._mirrors.get(id(x))
        if known is None or known[1] != x._version:
            if known is None:
                weakref.finalize(x, self._mirrors.pop, id(x), None)
            mirror = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device).copy_(x)
            self._mirrors[id(x)] = known = (mirror, x._version)
        return known[0]

    def _source(self, x: Source) -> Source:
        return self._difference(x) if isinstance(x, Difference) else self._of(x)

    def _difference(self, x: Difference) -> Difference:
        shared, own = self._of(x.shared), tuple(self._of(piece) for piece in x.own)
        known = self._differences.get(id(x))
        if known is None or known.shared is not shared or any(a is not b for a, b in zip(known.own, own, strict=True)):
            self._differences[id(x)] = known = Difference(shared, own)
        return known

    def _written(self, result: Any, *originals: Tensor) -> Any:
        for x in originals:
            mirror, _ = self._mirrors[id(x)]
            x.copy_(mirror)
            self._mirrors[id(x)] = mirror, x._version
        return result
