"""Which coordinates: thresholds that are exact, agreed between ranks, re-used, or Gaussian."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_host
from oktopk.schedule import is_due
from oktopk.transport.base import Transport
from oktopk.types import SparseVector, index_dtype

# The histogram that ranks add up to agree on a global threshold: one bin per power of two, then 512 bins inside one.
_EXPONENT_SHIFT, _EXPONENTS = 23, 256
_FINE_SHIFT, _FINE_BINS = 14, 512
TOLERANCE = 25  # survivors may be k / 25 more or fewer than k: values of 8 bits tie by hundreds, and ties cost a round
HISTOGRAM_RANKS = 4  # up to so many ranks tell each other their own histograms; more add them up, in two rounds more
HISTOGRAM_WORDS = _EXPONENTS + 2 * _FINE_BINS  # at most: the guessed exponent, and another when the guess was wrong


@dataclass(frozen=True)
class Winners:
    """The entries of this rank's region that survive globally."""

    kept: SparseVector
    threshold: float
    exponent: int  # the power of two the threshold lies in: the guess for the next step
    counts: list[int] | None = None  # how many each rank kept, if they know of each other


def winners(region: SparseVector, k: int, exponent: int, numel: int, transport: Transport, kernels: Kernels) -> Winners:
    """Keep about k of `numel` entries over the regions of all ranks, those largest in magnitude.

    All ranks add up a small histogram of magnitudes and read the same threshold off it. Only when many entries tie at
    the threshold are these taken in the order of ranks and indices until k are reached.
    """
    histograms = _Histograms(region.values, index_dtype(numel), transport, kernels)
    cut = _agree_on_cut(histograms, k, exponent)
    if not cut.wanted:
        return winners_above(region, cut.threshold, cut.exponent, kernels, cut.counts)
    ties = cut.ties or _count_ties(region, cut, transport, kernels)
    shares = _shares_of_ties(ties, cut.wanted)
    kept = kernels.above(region, cut.sure, cut.threshold, shares[transport.rank])
    counts = cut.counts and [count + share for count, share in zip(cut.counts, shares, strict=True)]
    return Winners(kept, cut.threshold, cut.exponent, counts)


def winners_above(
    region: SparseVector, threshold: float, exponent: int, kernels: Kernels, counts: list[int] | None = None
) -> Winners:
    """Keep what reaches a threshold that is known already."""
    return Winners(kernels.above(region, threshold), threshold, exponent, counts)


@dataclass(frozen=True)
class _Cut:
    threshold: float
    exponent: int
    sure: float  # what reaches this survives; it is the threshold unless there are ties
    counts: list[int] | None  # how many entries of each rank do, if their histograms are known
    wanted: int = 0  # how many of those between threshold and sure do, when they are too many: they count as ties
    ties: list[int] | None = None  # how many of these each rank has, if known


def _agree_on_cut(histograms: _Histograms, k: int, exponent: int) -> _Cut:
    exponents, fine = histograms.coarse_and_fine(exponent)
    from_top = _from_top(exponents)
    totals = from_top.sum(0)
    if int(totals[0]) <= k:
        return _Cut(0.0, exponent, 0.0, histograms.by_rank(from_top[:, 0]))
    found = int((totals >= k).nonzero().max())
    if found != exponent:
        fine = histograms.fine(found)
    return _cut_inside(histograms, _from_top(fine) + from_top[:, found + 1 : found + 2], found, k)


def _cut_inside(histograms: _Histograms, from_top: Tensor, exponent: int, k: int) -> _Cut:
    """The border of a fine bin that lets about k through."""
    totals = from_top.sum(0)
    bin_of = int((totals >= k).nonzero().max())
    with_bin, without = int(totals[bin_of]), int(totals[bin_of + 1])
    low, high = _bin_border(exponent, bin_of), _bin_border(exponent, bin_of + 1)
    with_ties, sure = histograms.by_rank(from_top[:, bin_of]), histograms.by_rank(from_top[:, bin_of + 1])
    if with_bin - k <= slack(k):
        return _Cut(low, exponent, low, with_ties)
    if k - without <= slack(k) and without > 0:
        return _Cut(high, exponent, high, sure)
    ties = with_ties and sure and [a - b for a, b in zip(with_ties, sure, strict=True)]
    return _Cut(low, exponent, high, sure, k - without, ties)


def slack(k: int) -> int:
    """How many more or fewer than k entries are as good as k."""
    return max(k // TOLERANCE, min(16, k // 2))


def _from_top(counts: Tensor) -> Tensor:
    """Per row: how many entries lie in each bin or above it; one more column for those above all, of which none are."""
    above = counts.flip(1).cumsum(1).flip(1)
    return torch.cat([above, above.new_zeros(above.shape[0], 1)], dim=1)


def _count_ties(region: SparseVector, cut: _Cut, transport: Transport, kernels: Kernels) -> list[int]:
    mine = kernels.above(region, cut.threshold).nnz - kernels.above(region, cut.sure).nnz
    return [row[0] for row in transport.agree([mine])]


def _shares_of_ties(ties: list[int], wanted: int) -> list[int]:
    """How many of its ties each rank keeps, when all of them together keep `wanted`: lower ranks first."""
    before = accumulate(ties, initial=0)
    return [min(max(0, wanted - already), own) for already, own in zip(before, ties, strict=False)]


@dataclass(frozen=True)
class _Histograms:
    """Histograms of the magnitudes in all regions. Sums that cancelled to zero count nowhere.

    One row for each rank, so that everyone knows what each will keep; for many ranks a single row, of their sum: rows
    of their own would take more bytes than the round that they save is worth.
    """

    values: Tensor
    dtype: torch.dtype  # wide enough for the count of all entries
    transport: Transport
    kernels: Kernels

    def coarse_and_fine(self, exponent: int) -> tuple[Tensor, Tensor]:
        """Both in one message."""
        counts = self._shared(torch.cat([self._count(_EXPONENT_SHIFT, 0, _EXPONENTS), self._count_fine(exponent)]))
        return counts[:, :_EXPONENTS], counts[:, _EXPONENTS:]

    def fine(self, exponent: int) -> Tensor:
        return self._shared(self._count_fine(exponent))

    def by_rank(self, counts: Tensor) -> list[int] | None:
        """A column of counts, if it has one of each rank."""
        return counts.tolist() if self._has_rows else None

    @property
    def _has_rows(self) -> bool:
        return self.transport.world_size <= HISTOGRAM_RANKS

    def _count_fine(self, exponent: int) -> Tensor:
        return self._count(_FINE_SHIFT, exponent << (_EXPONENT_SHIFT - _FINE_SHIFT), _FINE_BINS)

    def _count(self, shift: int, first: int, bins: int) -> Tensor:
        return self.kernels.magnitude_histogram(self.values, shift, first, bins)

    def _shared(self, counts: Tensor) -> Tensor:
        mine = counts.to(self.dtype)
        if not self._has_rows:
            return self.transport.all_reduce_(mine).to(torch.int64)[None]
        message = mine.view(torch.uint8)
        rows = self.transport.all_gather(message, [message.numel()] * self.transport.world_size)
        return torch.stack([row.view(self.dtype) for row in rows]).to(torch.int64)


def _bin_border(exponent: int, bin_of: int) -> float:
    bits = (exponent << _EXPONENT_SHIFT) + (bin_of << _FINE_SHIFT)
    border: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return border


def exponent_of(magnitude: float) -> int:
    """The power of two that a magnitude lies in."""
    bits: int = struct.unpack("<I", struct.pack("<f", magnitude))[0]
    return bits >> _EXPONENT_SHIFT


def without(vector: SparseVector, indices: Tensor, kernels: Kernels) -> SparseVector:
    """The entries of `vector` whose index is not in `indices`; both ascending."""
    if not indices.numel():
        return vector
    common = kernels.common(vector, indices)
    keep = torch.ones(vector.nnz, dtype=torch.bool)
    keep[torch.searchsorted(vector.indices, common.indices)] = False
    return vector.at(keep.nonzero().flatten()) if common.nnz else vector


class ReusedThreshold:
    """The paper's local threshold: exact every so often, nudged towards k in between, never far above k."""

    def __init__(self, every: int, nudge_up: float, nudge_down: float, keep: tuple[float, float], cap: float) -> None:
        self._every, self._up, self._down, self._keep, self._cap = every, nudge_up, nudge_down, keep, cap
        self.value = 0.0
        self._age = 0
        self._k = 0

    def is_due(self, k: int) -> bool:
        """Whether an exact threshold must be found now: the period is over, or k is not what it was."""
        return k != self._k or is_due(self._age, self._every)

    def is_too_many(self, count: int, k: int) -> bool:
        return count > self._cap * k

    def renew(self, value: float, k: int) -> None:
        self.value, self._k, self._age = value, k, 1

    def nudge(self, count: int, k: int) -> None:
        """Move the threshold when too many or too few passed it."""
        self._age += 1
        if count > self._keep[1] * k:
            self.value *= self._up
        elif count < self._keep[0] * k:
            self.value /= self._down

    def select(self, x: Tensor, k: int, kernels: Kernels) -> tuple[SparseVector, float]:
        """Choose locally: re-use the threshold unless it is due, or lets too many through."""
        if k < x.numel() and not self.is_due(k):
            threshold = self.value
            # Counted first: a stale threshold must not blow up the buffers that a selection fills.
            count = kernels.count_above(x, threshold)
            if count and not self.is_too_many(count, k):
                self.nudge(count, k)
                return kernels.select_above(x, threshold), threshold
        chosen, threshold = kernels.select_topk(x, k)
        self.renew(threshold, k)
        return chosen, threshold

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "age": self._age, "k": self._k}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._age, self._k = float(state["value"]), int(state["age"]), int(state["k"])


def gaussian_select(
    x: Tensor, k: int, corrections: int, tolerance: float, kernels: Kernels
) -> tuple[SparseVector, float]:
    """Choose by the threshold a normal distribution would have, corrected until the count is near k.

    When the corrections do not get there (a gradient far from normal), the exact threshold is used instead: the volume
    of a step must not depend on luck.
    """
    low, high = k * (1 - tolerance), most_selected(k, tolerance)
    threshold = _normal_threshold(x, k)
    for _ in range(corrections):
        count = kernels.count_above(x, threshold)
        if low <= count <= high:
            return kernels.select_above(x, threshold), threshold
        # The tail of a normal falls like exp(-t^2/2): the relative step shrinks as the count gets close.
        threshold *= 1.5 if count > 2 * k else 0.5 if count < k / 2 else (count / k) ** 0.25
    return kernels.select_topk(x, k)


def most_selected(k: int, tolerance: float) -> int:
    """How many entries `gaussian_select` chooses at most."""
    return int(k * (1 + tolerance))


def _normal_threshold(x: Tensor, k: int) -> float:
    mean, std = to_host(torch.stack([x.mean(), x.std(correction=0)]))[0]
    tail = min(0.5, k / x.numel() / 2)
    return abs(float(mean)) + float(std) * abs(NormalDist().inv_cdf(tail))
