"""Kernels for NVIDIA and AMD GPUs, compiled by Triton: two reads and two writes of a gradient from sum to mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oktopk.kernels import triton_loops as loops
from oktopk.kernels import triton_search as search
from oktopk.kernels.base import Kernels
from oktopk.kernels.staged import StagedKernels
from oktopk.kernels.staging import to_device, to_host
from oktopk.kernels.tensors import UNKNOWN, is_same, require_inside, require_same_size, require_whole, version, written
from oktopk.kernels.triton_search import Entries, Found, Search, launch
from oktopk.types import Difference, Source, SparseVector

_UP_TO_32_BITS = (torch.float32, torch.float16, torch.bfloat16)


class TritonKernels(StagedKernels):
    """Compiled kernels for vectors of up to 32 bits; others are left to plain torch.

    `accumulate_`, `add` and `scan` with k already choose, so that one wait brings the sum of squares and what is
    chosen.
    """

    name = "triton"

    def __init__(self, device: torch.device, host: Kernels) -> None:
        super().__init__(device, host)
        self._search = Search(device)
        self._largest: _Ready | None = None  # chosen when they were announced
        self._reached: _Ready | None = None  # brought along when they were counted
        self._k = 0  # last announced: about so many entries will reach a threshold

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        if not (_is_sum(residual) and _is_served(grad)):
            return super().accumulate_(residual, grad, k)
        require_same_size(residual, grad)
        written(residual)
        return self._make(Entries(residual, residual, (grad,), 1, residual), k)

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        if not (_is_sum(out, residual) and _is_served(*pieces)):
            return super().add(out, residual, pieces, k)
        require_whole(sum(piece.numel() for piece in pieces), residual)
        written(out)
        return self._make(Entries(out, residual, tuple(pieces), 1, out), k)

    def scan(self, difference: Difference, k: int = 0) -> float:
        if not _is_sum(difference.shared, *difference.own):
            return super().scan(difference, k)
        return self._make(Entries.of(difference), k)

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        if self._is_elsewhere(x) or not _is_served(*_vectors(x)):
            return super().select_topk(x, k)
        known = self._largest
        if known is not None and k <= known.asked and known.serves(x):
            return known.largest(k, self._host)
        if k < 1 or x.numel() == 0:
            return SparseVector.empty(x.numel(), torch.empty(0, dtype=x.dtype)), 0.0
        found = self._search.largest(Entries.of(x), k)
        if found.chosen is None:
            found = self._search.largest_of_all(Entries.of(x), k)
        assert found.chosen is not None
        return found.chosen, found.threshold

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        if self._is_elsewhere(x) or not _is_served(x):
            return super().select_above(x, threshold)
        count = self.count_above(x, threshold)
        if self._reached is not None:
            return self._reached.chosen
        found = self._search.above(Entries.of(x), _key(threshold, x.dtype), count)
        assert found.chosen is not None
        return found.chosen

    def count_above(self, x: Tensor, threshold: float) -> int:
        """Also brings the entries along, if they are not far more than were announced: those are asked for next."""
        if self._is_elsewhere(x) or not _is_served(x):
            return super().count_above(x, threshold)
        found = self._above_on_host(x, threshold)
        if found is None:
            room = search.room_for(self._k, x.numel())
            found = self._search.above(Entries.of(x), _key(threshold, x.dtype), room)
        self._reached = None if found.chosen is None else _Ready(x, version(x), found.chosen, threshold)
        return found.count

    def _above_on_host(self, x: Tensor, threshold: float) -> Found | None:
        """The same among entries that are here already, if all that reach the threshold are."""
        known, largest = self._reached, self._largest
        if known is not None and threshold >= known.asked and known.serves(x):
            if threshold == known.asked:
                return Found(0.0, known.chosen.nnz, known.chosen)
            chosen = known.chosen
        elif largest is not None and threshold > largest.threshold and largest.serves(x):
            chosen = largest.chosen
        else:
            return None
        places = self._host.select_above(chosen.values, threshold).indices
        return Found(0.0, places.numel(), chosen.at(places.long()))

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        if self._is_elsewhere(x) or not _is_served(*_vectors(x)):
            return super().pick(x, indices)
        require_inside(indices, x.numel())
        return SparseVector(indices, self._search.pick(Entries.of(x), indices), x.numel())

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        if not _is_sum(residual, sent.values):
            return super().retain_(residual, sent)
        require_inside(sent.indices, residual.numel())
        written(residual)
        changes = []
        for run in _ascending(sent):
            indices, values = to_device(self._device, run.indices, run.values)
            changes.append(_new_changes(residual, run))
            launch(
                loops.subtract_at, changes[-1].numel(), residual, indices, values, run.nnz, changes[-1],
                BLOCK=search.BLOCK,
            )  # fmt: skip
        return _total(changes)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        if not _is_sum(*_vectors(difference), mean.values, sent.values):
            return super().move_(difference, mean, sent)
        for vector in (mean, sent):
            require_inside(vector.indices, difference.numel())
        for changed in _vectors(difference):
            written(changed)
        first, *rest = _ascending(sent)
        taken, left = _met(mean, first)
        moves = [(mean, taken), *((run.with_values(torch.zeros_like(run.values)), run.values) for run in (left, *rest))]
        return _total([self._move(difference, *move) for move in moves])

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        if not all(piece.is_contiguous() and piece.dtype == pieces[0].dtype for piece in pieces):
            return super().fill_(pieces, vector)
        require_inside(vector.indices, sum(piece.numel() for piece in pieces))
        torch._foreach_zero_(list(pieces))
        if vector.nnz == 0:
            return None
        # Rounded on the host, where it is the same for every kind of device.
        rounded = vector.values.to(pieces[0].dtype)
        indices, values = to_device(self._device, vector.indices, rounded)
        where = self._search.table(pieces)
        launch(
            loops.write_at, -(-vector.nnz // search.BLOCK), where.first, *where.search, indices, values, vector.nnz,
            SCATTERED=where.is_scattered, BLOCK=search.BLOCK,
        )  # fmt: skip
        return None

    def _make(self, entries: Entries, k: int) -> float:
        """The sum of squares of a vector that is made now; its k largest entries are ready for `select_topk` then."""
        self._largest, self._reached, self._k = None, None, k
        found = self._search.largest(entries, k)
        if found.chosen is not None:
            self._largest = _Ready(entries.source, version(entries.source), found.chosen, k, found.threshold)
        return found.energy

    def _move(self, difference: Difference, run: SparseVector, sent: Tensor) -> Tensor:
        indices, values, taken = to_device(self._device, run.indices, run.values, sent)
        where, changes = self._search.table(difference.own), _new_changes(difference.shared, run)
        launch(
            loops.move_at, changes.numel(), difference.shared, where.first, *where.search, indices, values, taken,
            run.nnz, changes, SCATTERED=where.is_scattered, BLOCK=search.BLOCK,
        )  # fmt: skip
        return changes


@dataclass(frozen=True)
class _Ready:
    """A selection from `source` as it is in this version, made before it was asked for."""

    source: Source
    version: int
    chosen: SparseVector
    asked: float  # how many, or what they reach
    threshold: float = 0.0  # smallest magnitude among the largest

    def largest(self, k: int, host: Kernels) -> tuple[SparseVector, float]:
        """The k largest of those that were asked for."""
        if k == self.asked:
            return self.chosen, self.threshold
        places, threshold = host.select_topk(self.chosen.values, k)
        return self.chosen.at(places.indices.long()), threshold

    def serves(self, x: Source) -> bool:
        return is_same(x, self.source) and version(x) == self.version != UNKNOWN


def _vectors(x: Source) -> tuple[Tensor, ...]:
    return (x.shared, *x.own) if isinstance(x, Difference) else (x,)


def _is_served(*vectors: Tensor) -> bool:
    """Whether kernels can read them: one dtype that float32 can hold, and no gaps."""
    return all(x.dtype in _UP_TO_32_BITS and x.dtype == vectors[0].dtype and x.is_contiguous() for x in vectors)


def _is_sum(*vectors: Tensor) -> bool:
    """Whether kernels can calculate in them."""
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in vectors)


def _ascending(vector: SparseVector) -> Iterator[SparseVector]:
    """Parts in which no index comes twice: one after the other they do what a loop over all does, to the last bit."""
    drops = (vector.indices[1:] <= vector.indices[:-1]).nonzero().flatten().add_(1).tolist()
    for start, stop in pairwise([0, *drops, vector.nnz]):
        yield SparseVector(vector.indices[start:stop], vector.values[start:stop], vector.numel)


def _met(vector: SparseVector, other: SparseVector) -> tuple[Tensor, SparseVector]:
    """The values of `other` at the entries of `vector`, zero where it has none; and what it has beside them."""
    met = vector.values.new_zeros(vector.nnz)
    if vector.nnz == 0:
        return met, other
    at = torch.searchsorted(vector.indices, other.indices).clamp_(max=vector.nnz - 1)
    both = vector.indices[at] == other.indices
    met[at[both]] = other.values[both]
    return met, other.at((~both).nonzero().flatten())


def _new_changes(like: Tensor, run: SparseVector) -> Tensor:
    """Room for how each block of entries changes a sum of squares."""
    return like.new_empty(-(-run.nnz // search.BLOCK), dtype=torch.float64)


def _total(changes: Sequence[Tensor]) -> float:
    return float(to_host(torch.cat(list(changes)).sum())[0])


def _key(threshold: float, dtype: torch.dtype) -> int:
    """The smallest key whose magnitude reaches `threshold`, which is rounded to `dtype` first; never that of zero."""
    rounded = torch.tensor([threshold], dtype=dtype).float()
    return 1 if bool(rounded <= 0) else int(rounded.view(torch.int32))
