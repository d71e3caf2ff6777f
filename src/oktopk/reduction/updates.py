"""Error feedback for updates: a rank's own weights are the shared weights minus what it still owes.

The shared weights s are the same bits on every rank. An optimizer steps the own weights x, so s - x is what this rank
has changed and not sent yet. A reduction of s - x gives `mean` and `sent`; then s -= mean and x -= mean - sent, which
touches only entries that moved, and s - x is what is still owed. With float32 or float64 weights nothing else has to be
remembered. Weights of 16 bits cannot hold what is owed to the last bit: it is kept beside them in float32.

Own weights may also forget what is owed, or most of it (`keep_owed` below 1): at a synchronisation s - x is added to
what is owed, which is kept beside them, and x becomes s, less the share that is kept. Ranks then go on from nearly the
same weights, and drift apart by little more than they change in one interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from oktopk.errors import OkTopkError
from oktopk.kernels.base import Kernels
from oktopk.kernels.pages import cat_on_large_pages
from oktopk.kernels.staging import to_device
from oktopk.kernels.tensors import sum_of_squares
from oktopk.reduction.feedback import residual_dtype
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.types import Difference, Reduced, Source, SparseVector, Vector, to_dense

log = logging.getLogger("oktopk")


@dataclass
class _Weights:
    """The shared weights of one layout, and what goes with them."""

    shared: Tensor  # flat, float32 or float64
    owed: Tensor | None = None  # where own weights do not hold it: flat, as `shared`
    before: tuple[Tensor, ...] = ()  # what own weights were when `owed` was last brought up to date; of those that
    # forget what is owed and have the dtype of the shared ones, these are the shared ones themselves
    kept: float = 0.0  # what own weights, where they forget what is owed, took of it: so many times what lies beside
    energy: float = 0.0  # sum of squares of what is owed
    difference: Difference | None = None
    source: Source | None = None  # what is being reduced
    is_bad: bool = False  # a step left own weights that are not finite: nothing is reduced until all ranks know
    arrived: Reduced | None = None  # reduced, but not applied yet

    @property
    def is_beside(self) -> bool:
        """Whether what is owed lies beside own weights, not in them."""
        return self.owed is not None


@dataclass
class Updates:
    """What `Feedback` is for gradients, for weights: the same verbs, called by the same pipeline.

    With `deferred` a reduction is applied by `apply`, not as soon as it is done: training goes on meanwhile.
    """

    kernels: Kernels
    keep_owed: float = 1.0  # share of what is owed that own weights contain after a synchronisation
    deferred: bool = False
    _weights: dict[Layout, _Weights] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        return self.keep_owed >= 1

    def begin(self, own: Gradient) -> None:
        """Share these weights, which must be the same on every rank. Nothing is owed."""
        dtype = residual_dtype(own.dtype)
        weights = _Weights(cat_on_large_pages([piece.to(dtype) for piece in own.pieces]))
        if own.dtype != dtype or not self.keeps_all:
            weights.owed = torch.zeros_like(weights.shared)
        if own.dtype != dtype:
            weights.before = tuple(piece.clone() for piece in own.pieces)
        elif not self.keeps_all:
            weights.before = own.cut(weights.shared)
        self._weights[own.layout] = weights

    def choose(self, own: Gradient, k: int, ask_ahead: Callable[[Difference, int], None]) -> None:
        """Fix what is going to be reduced now, so that the own weights may change while it travels.

        k entries of it, which `ask_ahead` makes it keep, or with k = 0 all.
        """
        weights = self._of(own)
        weights.source = None
        if not self.is_finite(own, k):
            self._take_back_(own)  # now: while it travels, own weights are training's
            weights.energy, weights.source = inf, weights.shared  # it is going to be refused
            return
        self.follow(own)
        source = self._source(own, weights)
        if k and isinstance(source, Difference):
            ask_ahead(source, k)
        elif isinstance(source, Difference):
            source = source.to_dense()
        weights.source = source

    # -- the verbs of the pipeline -------------------------------------------------------------------------------

    def is_finite(self, own: Gradient, k: int) -> bool:
        """Whether the own weights hold neither NaN nor Inf. Changes nothing."""
        weights = self._of(own)
        if self.deferred and weights.source is not None:  # chosen already
            return isfinite(weights.energy)
        if weights.is_bad:
            return False
        if weights.is_beside:
            return self.kernels.all_below(own.pieces, inf)
        difference = self._difference(own, weights)
        weights.energy = self.kernels.scan(difference, k) if k > 1 else self.kernels.glance(difference)
        return isfinite(weights.energy)

    def ahead(self, own: Gradient) -> Source | None:
        """What `compensate` is going to return, if that is known already; what lies beside weights is not."""
        weights = self._of(own)
        if self.deferred and weights.source is not None:
            return weights.source
        return None if weights.is_beside else self._difference(own, weights)

    def compensate(self, own: Gradient, k: int, with_feedback: bool) -> Source:
        """What was changed and not sent yet. Only entries are chosen from it if k is not 0."""
        weights = self._of(own)
        if not self.deferred or weights.source is None:
            for part in own.parts():
                self.follow(part)
            weights.source = self._source(own, weights)
        if k:
            return weights.source
        dense = weights.source.to_dense() if isinstance(weights.source, Difference) else weights.source
        weights.source = dense
        return dense.clone() if self.deferred else dense  # an algorithm that sends everything may overwrite it

    def retain(self, own: Gradient, reduced: Reduced, with_feedback: bool) -> None:
        """Move the shared weights by the mean, of all parts that ranks of a host have; what was not sent stays owed."""
        for part, outcome in own.everyones(reduced):
            weights = self._of(part)
            weights.arrived = outcome
            if not self.deferred:
                self.apply(part)
            elif outcome.sent is None:
                assert isinstance(weights.source, Tensor)
                weights.arrived = Reduced(outcome.mean, weights.source, outcome.stats)

    def apply(self, own: Gradient) -> None:
        """Do what `retain` put off, if it did."""
        weights = self._of(own)
        arrived, weights.arrived = weights.arrived, None
        weights.source = None
        if arrived is None:
            return
        if weights.is_beside:
            if self.deferred and not self.is_finite(own, 0):  # what lies beside them would follow
                weights.is_bad = True
                self._take_back_(own)
            self._apply_beside(own, weights, arrived)
        elif isinstance(arrived.mean, SparseVector) and isinstance(arrived.sent, SparseVector):
            weights.energy += self.kernels.move_(self._difference(own, weights), arrived.mean, arrived.sent)
        else:
            self._apply_dense(own, weights, arrived)

    def reject_(self, own: Gradient) -> None:
        """A step was bad on some rank: one whose weights are not finite takes them back."""
        for part in own.parts():
            self._of(part).source = None
        if self.deferred:  # they were taken back when it was chosen
            self._of(own).is_bad = False
        else:
            self.rest_(own)

    def rest_(self, own: Gradient) -> None:
        """What a step left that is not finite is what it was."""
        for part in own.parts():
            self._of(part).is_bad = False
            self._take_back_(part)

    def _take_back_(self, own: Gradient) -> None:
        weights = self._of(own)
        for (name, _), piece, fallback in zip(own.layout, own.pieces, self._good(own, weights), strict=True):
            bad = ~piece.isfinite()
            if bad.any():
                log.warning("%d entries of %s were not finite, and are what they were.", int(bad.sum()), name)
                piece.copy_(torch.where(bad, fallback.to(piece.dtype), piece))

    def _good(self, own: Gradient, weights: _Weights) -> Sequence[Tensor]:
        """What own weights were after the last synchronisation, as far as it is known."""
        good = weights.before or own.cut(weights.shared)
        if not weights.kept or weights.owed is None:
            return good
        return [before - weights.kept * owed for before, owed in zip(good, own.cut(weights.owed), strict=True)]

    def owes(self, layout: Layout) -> bool:
        return True

    def norm(self, layout: Layout) -> float:
        return sqrt(max(0.0, self._weights[layout].energy))

    @contextmanager
    def withheld(self, layout: Layout, names: Collection[str]) -> Iterator[None]:
        """Weights always take part: one that no rank used has not changed."""
        yield

    def remember(self, own: Gradient, unused: Collection[str]) -> None:
        """A step that is skipped changes nothing here, so there is nothing to undo."""

    def undo(self) -> None: ...

    def forget(self) -> None: ...

    def scale_(self, factor: float) -> None:
        raise OkTopkError("weights have no gradient scale: a GradScaler is local when updates are reduced.")

    # -- state ---------------------------------------------------------------------------------------------------

    def shared(self, layout: Layout) -> Tensor:
        """The shared weights themselves, flat."""
        return self._weights[layout].shared

    def owed(self, own: Gradient) -> Tensor:
        """A copy of what this rank still owes, flat."""
        weights = self._of(own)
        if weights.owed is None:
            return Difference(weights.shared, own.pieces).to_dense()
        return weights.owed + self._change(own, weights)

    def forgotten(self, own: Gradient) -> Tensor:
        """A copy of what this rank owed at the last synchronisation and its weights did not contain; else nothing."""
        weights = self._of(own)
        return weights.shared[:0] if self.keeps_all or weights.owed is None else weights.owed.clone()

    def kept(self, own: Gradient) -> float:
        """What own weights that forget what is owed took of it, in units of what `forgotten` tells."""
        return self._of(own).kept

    @contextmanager
    def forgotten_set_aside(self) -> Iterator[None]:
        """Inside, only what own weights hold is reduced, and not what they have forgotten, which stays owed."""
        those = [] if self.keeps_all else list(self._weights.values())
        aside = [(weights, weights.owed) for weights in those if weights.owed is not None]
        for weights, owed in aside:
            weights.owed = torch.zeros_like(owed)
        try:
            yield
        finally:
            for weights, owed in aside:
                weights.owed = owed.add_(weights.owed if weights.owed is not None else 0.0)
                weights.kept = 0.0

    def restore(self, own: Gradient, shared: Tensor, owed: Tensor, kept: float = 0.0) -> None:
        """Continue with these shared weights. `owed` is what own weights, as they are now, do not hold of it."""
        self.begin(own)
        weights = self._weights[own.layout]
        weights.kept = 0.0 if self.keeps_all else kept
        weights.shared.copy_(shared)
        if weights.owed is not None:
            weights.owed.copy_(owed)
        if not self.keeps_all:
            for before, part in zip(weights.before, own.cut(weights.shared), strict=True):
                before.copy_(part)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing by itself: what is owed lies in weights, which the front end saves."""
        return {}

    def velocities(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor] | None = None) -> None:
        """As `state_dict`."""

    def arrived(self, layout: Layout) -> Reduced | None:
        """What was reduced and not applied yet."""
        return self._weights[layout].arrived

    def resume_arrived(self, layout: Layout, arrived: Reduced | None) -> None:
        """Continue with what `arrived` told when it was saved, wherever the weights are now."""
        weights, device = self._weights[layout], self._weights[layout].shared.device
        weights.arrived = arrived
        if arrived is not None and isinstance(arrived.mean, Tensor):
            sent = arrived.sent.to(device) if isinstance(arrived.sent, Tensor) else arrived.sent
            weights.arrived = Reduced(arrived.mean.to(device), sent, arrived.stats)

    def _of(self, own: Gradient) -> _Weights:
        if own.layout not in self._weights:
            raise OkTopkError(
                'nobody shared these weights: reduce="updates" is what oktopk.local_steps sets, which does.'
            )
        return self._weights[own.layout]

    def _difference(self, own: Gradient, weights: _Weights) -> Difference:
        """The same object as long as the weights lie where they did: kernels remember what they saw in it."""
        known = weights.difference
        if known is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(known.own, own.pieces, strict=True)):
            weights.difference = Difference(weights.shared, own.pieces)
        assert weights.difference is not None
        weights.difference.largest = weights.difference.picked = None
        return weights.difference

    def _source(self, own: Gradient, weights: _Weights) -> Source:
        if weights.owed is None:
            return self._difference(own, weights)
        weights.energy = sum_of_squares(weights.owed)
        return weights.owed.clone() if self.deferred else weights.owed

    def follow(self, own: Gradient) -> None:
        """Bring what lies beside weights up to date; those that do not keep all of it are the shared ones then.

        Ranks of a host do so for all parts, to have the same bits.
        """
        weights = self._of(own)
        if weights.owed is None:
            return
        dtype, weights.kept = weights.shared.dtype, 0.0
        parts = zip(own.cut(weights.owed), weights.before, own.pieces, own.cut(weights.shared), strict=True)
        for owed, before, piece, shared in parts:
            owed += before.to(dtype) - piece.to(dtype)
            if not self.keeps_all:
                piece.copy_(shared)
            if before.data_ptr() != shared.data_ptr():
                before.copy_(piece)

    def _change(self, own: Gradient, weights: _Weights) -> Tensor:
        dtype = weights.shared.dtype
        return torch.cat([a.to(dtype) - b.to(dtype) for a, b in zip(weights.before, own.pieces, strict=True)])

    def _apply_dense(self, own: Gradient, weights: _Weights, arrived: Reduced) -> None:
        mean = to_dense(arrived.mean)
        if arrived.sent is None:
            weights.shared.sub_(mean)
            weights.energy = 0.0
            for piece, part in zip(own.pieces, own.cut(weights.shared), strict=True):
                piece.copy_(part)
            return
        weights.shared.sub_(mean)
        for piece, part in zip(own.pieces, own.cut(mean - to_dense(arrived.sent)), strict=True):
            piece.sub_(part)
        weights.energy = sum_of_squares(self.owed(own))

    def _apply_beside(self, own: Gradient, weights: _Weights, arrived: Reduced) -> None:
        """Own weights follow at the entries that moved, rounded afresh: errors of rounding do not add up."""
        assert weights.owed is not None
        if self.deferred:
            self.follow(own)
        _subtract(weights.shared, arrived.mean)
        if arrived.sent is None:
            weights.owed.zero_()
        else:
            _subtract(weights.owed, arrived.sent)
        parts = zip(weights.before, own.pieces, own.cut(weights.shared), own.cut(weights.owed), strict=True)
        for (before, piece, shared, owed), places in zip(parts, _touched(arrived, own), strict=True):
            piece[places] = (shared[places] - owed[places] if self.keeps_all else shared[places]).to(piece.dtype)
            before[places] = piece[places]
        weights.energy = sum_of_squares(weights.owed)
        if 0 < self.keep_owed < 1:
            self._keep_some(own, weights)

    def _keep_some(self, own: Gradient, weights: _Weights) -> None:
        """Own weights, which are the shared ones, take their share of what lies beside them."""
        assert weights.owed is not None
        weights.kept = self.keep_owed / (1 - self.keep_owed)
        for before, piece, owed in zip(weights.before, own.pieces, own.cut(weights.owed), strict=True):
            piece.copy_(before.to(owed.dtype) - self.keep_owed * owed)
            owed -= before.to(owed.dtype) - piece.to(owed.dtype)


def _subtract(vector: Tensor, amount: Vector) -> None:
    if isinstance(amount, SparseVector):
        indices, values = to_device(vector.device, amount.indices.long(), amount.values.to(vector.dtype))
        vector.index_add_(0, indices, values, alpha=-1)
    else:
        vector.sub_(amount)


def _touched(arrived: Reduced, own: Gradient) -> Sequence[Tensor | slice]:
    """Which entries of each piece a reduction moves. Told apart on the host, so that nobody waits for a device."""
    if not isinstance(arrived.mean, SparseVector) or not isinstance(arrived.sent, SparseVector):
        return [slice(None)] * len(own.pieces)
    touched = torch.cat([arrived.mean.indices, arrived.sent.indices]).long().unique()
    sizes = torch.tensor([piece.numel() for piece in own.pieces])
    ends = sizes.cumsum(0)
    counts = torch.searchsorted(touched, ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    (places,) = to_device(own.pieces[0].device, touched - (ends - sizes).repeat_interleave(counts))
    return list(places.split(counts.tolist()))
