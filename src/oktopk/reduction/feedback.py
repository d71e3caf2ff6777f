"""Error feedback: what is still owed, the residual of every parameter, shared by all algorithms."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from oktopk.algorithms.base import less
from oktopk.kernels.base import Kernels
from oktopk.kernels.staging import to_device
from oktopk.kernels.tensors import largest_magnitude, sum_of_squares
from oktopk.reduction.gradient import Gradient, Layout
from oktopk.types import Reduced, SparseVector, Vector

_LIMITS = {dtype: torch.finfo(dtype).max * (1 - 1e-6) for dtype in (torch.float32, torch.float64)}


class Feedback:
    """Residuals, and with `momentum` the velocities of Deep Gradient Compression, by parameter name.

    Momentum correction applies momentum before an entry is sent, so that what waits in the residual has had its
    momentum too. Masking stops the momentum of entries that have just been sent.
    """

    def __init__(self, kernels: Kernels, momentum: float = 0.0, masking: bool = False) -> None:
        self._kernels = kernels
        self._momentum, self._masking = momentum, masking
        self._residuals, self._velocities = ByName(), ByName()
        self._energy: dict[Layout, float] = {}  # sum of squares
        self._paid: set[Layout] = set()  # a dense step paid everything back, and nothing was added since
        self._spare: Tensor | None = None  # memory for one more vector: in `prepare`, and in `joined`
        self._freed: dict[Layout, Tensor] = {}  # memory of what was remembered in the step before
        self._is_remembering = False  # `compensate` leaves the residual behind that `undo` wants
        self._prepared: _Prepared | None = None

    def prepare(self, gradient: Gradient, k: int) -> bool | None:
        """Do the work of `compensate` beside the residual, which stays as it is until then. Whether all is finite.

        The two change places afterwards, so that this takes memory for one more vector, the longest, and the look for
        NaN costs nothing. None, and nothing is done: with momentum, if nothing is going to be selected (k is 0), or if
        residuals would have to be moved into this layout, which may yet be refused.
        """
        self._prepared = None  # also what a step prepared that was then refused or skipped
        residual = self._residuals.at(gradient.layout, gradient.pieces[0])
        if k == 0 or self._momentum or residual is None:
            return None
        vector = self._freed.pop(gradient.layout, None)
        if vector is None or vector.dtype != residual.dtype or vector.device != residual.device:
            vector = self._spare_for(gradient)
        energy = gradient.add_to(vector, residual, self._kernels, k)
        self._prepared = _Prepared(gradient.layout, vector, energy)
        return math.isfinite(energy) or self._kernels.all_below([vector], inf)

    def ahead(self, gradient: Gradient) -> Tensor | None:
        """What `compensate` is going to return, if it is known already."""
        prepared = self._prepared
        return prepared.vector if prepared is not None and prepared.layout == gradient.layout else None

    def is_finite(self, gradient: Gradient, k: int) -> bool:
        """Whether the gradient, and its sum with what is owed, hold neither NaN nor Inf. Changes no residual."""
        finite = self.prepare(gradient, k)
        if finite is not None:
            return finite
        limit = _LIMITS[residual_dtype(gradient.dtype)] - self._largest_owed(gradient)
        pieces = gradient.pieces if gradient.whole is gradient else [self.joined(gradient)]
        if self._kernels.all_below(pieces, limit):
            return True
        # Some entry may overflow together with what is owed, or is not finite itself: look at the sum.
        return self._kernels.all_below([self._sum_of(gradient)], inf)

    def compensate(self, gradient: Gradient, k: int, with_feedback: bool) -> Tensor:
        """The gradient plus what is owed. The result is the residual itself: `retain` says what left it.

        `k` entries of it are going to be selected, if it is not 0. Without feedback nothing is owed, and the result
        is the gradient, as one tensor in the precision of residuals.
        """
        if not with_feedback:
            return self.joined(gradient).to(residual_dtype(gradient.dtype))
        layout = gradient.layout
        self._paid.discard(layout)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.layout == layout:
            self._energy[layout] = prepared.energy
            self._leave_behind(layout, self._residuals.exchange(layout, prepared.vector))
            return prepared.vector
        residual = self._residuals.get(layout, gradient.pieces[0])
        self._energy[layout] = self._kernels.accumulate_(residual, self._with_momentum(gradient), k)
        return residual

    def retain(self, gradient: Gradient, reduced: Reduced, with_feedback: bool) -> None:
        """Hand the mean back into the gradient; everything that was not sent stays owed."""
        sent, lost = reduced.sent, gradient.receive_(reduced.mean, self._kernels)
        if lost is not None and isinstance(sent, SparseVector):
            # Each rank keeps what the rounding of the mean took: summed over ranks, that is all of it.
            sent = less(sent, lost)
        if with_feedback:
            self._subtract(gradient.layout, sent)

    def joined(self, gradient: Gradient) -> Tensor:
        """All of a gradient as one tensor, which is good until the next call."""
        if not gradient.is_scattered:
            return gradient.pieces[0]
        return gradient.join_(self._spare_for(gradient))

    def reject_(self, gradient: Gradient) -> None:
        """Some rank's gradient was not finite: a GradScaler, or the trainer, shall see that and skip the step."""
        gradient.fill_(float("nan"))

    def owes(self, layout: Layout) -> bool:
        """Whether a gradient of this layout must be compensated."""
        if self._momentum > 0.0:
            return True
        if layout in self._paid and self._residuals.is_at(layout):
            return False
        return any(name in self._residuals for name, _ in layout)

    def norm(self, layout: Layout) -> float:
        """Of what is owed; a sum of squares that rounding left just below zero is none."""
        energy = self._energy.get(layout, 0.0)
        return math.sqrt(energy) if not energy < 0.0 else 0.0

    def scale_(self, factor: float) -> None:
        """Multiply everything: the unit of the gradient has changed."""
        self._residuals.scale_(factor)
        self._velocities.scale_(factor)
        self._energy = {layout: energy * factor * factor for layout, energy in self._energy.items()}

    @contextmanager
    def withheld(self, layout: Layout, names: Collection[str]) -> Iterator[None]:
        """Let the residuals of `names` sit out a reduction: nobody would receive what they pay."""
        if not names:
            yield
            return
        self._prepared = None  # with the residuals that are to sit out
        held = self._residuals.take(names), self._velocities.take(names)
        try:
            yield
        finally:
            self._paid.discard(layout)
            self._residuals.give_back(held[0])
            self._velocities.give_back(held[1])
            self._energy[layout] = self._energy.get(layout, 0.0) + sum_of_squares(*held[0].values())

    def remember(self, gradient: Gradient, unused: Collection[str]) -> None:
        """Keep what is owed now, for `undo`: a copy, unless the next residual is prepared beside it already."""
        self._is_remembering = self.ahead(gradient) is not None and not unused
        if self._is_remembering:
            return
        self._residuals.remember(gradient.layout, gradient.pieces[0], self._freed.pop(gradient.layout, None))
        if self._momentum:
            self._velocities.remember(gradient.layout, gradient.pieces[0])

    def _leave_behind(self, layout: Layout, residual: Tensor) -> None:
        """Another has taken its place: it is remembered if that was asked for, else memory for the next."""
        if not self._is_remembering:
            self._spare = residual
            return
        self._residuals.remembered[layout], self._is_remembering = residual, False
        if self._spare is self._residuals.flat(layout):
            self._spare = None

    def undo(self) -> None:
        """Put everything back as it was when remembered."""
        self._paid.clear()
        for layout in self._residuals.remembered:
            self._energy.pop(layout, None)
        self._residuals.undo()
        self._velocities.undo()

    def forget(self) -> None:
        """What was remembered is no longer needed."""
        self._freed, self._residuals.remembered = self._residuals.remembered, {}
        self._velocities.remembered.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """A flat copy of every residual, by parameter name."""
        return self._residuals.state_dict()

    def velocities(self) -> dict[str, Tensor]:
        """A flat copy of every velocity, by parameter name."""
        return self._velocities.state_dict()

    def load_state_dict(self, residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor] | None = None) -> None:
        """Replace everything; each name moves into its bucket when that is next reduced."""
        self._residuals, self._velocities, self._energy = ByName(residuals), ByName(velocities or {}), {}
        self._paid.clear()

    def _subtract(self, layout: Layout, sent: Vector | None) -> None:
        residual = self._residuals.flat(layout)
        if sent is None:
            residual.zero_()
            self._energy[layout] = 0.0
            self._paid.add(layout)
        elif isinstance(sent, SparseVector):
            self._energy[layout] += self._kernels.retain_(residual, sent)
            if self._masking:
                velocity = self._velocities.flat(layout)
                velocity[to_device(velocity.device, sent.indices.long())[0]] = 0.0
        else:
            residual.sub_(sent)
            self._energy[layout] = sum_of_squares(residual)

    def _largest_owed(self, gradient: Gradient) -> float:
        """A bound of what any entry is owed: of the residual, and of a velocity that will be added to it."""
        layout = gradient.layout
        if layout not in self._energy or not self._residuals.is_at(layout):
            owed = [self._residuals.view(name) for name in gradient.names if name in self._residuals]
            self._energy[layout] = sum_of_squares(*owed)
        if not self._momentum:
            return self.norm(layout)
        moving = [self._velocities.view(name) for name in gradient.names if name in self._velocities]
        return self.norm(layout) + largest_magnitude(*moving)

    def _sum_of(self, gradient: Gradient) -> Tensor:
        """A fresh copy of what `compensate` would make."""
        layout, like = gradient.layout, gradient.pieces[0]
        grad = self.joined(gradient).to(residual_dtype(like.dtype))
        if self._momentum:
            grad = self._velocities.get(layout, like) * self._momentum + grad
        return self._residuals.get(layout, like) + grad

    def _spare_for(self, gradient: Gradient) -> Tensor:
        """A vector as long as this gradient, in memory made once: fresh memory costs more than the work on it."""
        like, dtype = gradient.pieces[0], residual_dtype(gradient.dtype)
        spare = self._spare
        if spare is None or spare.dtype != dtype or spare.device != like.device or _room(spare) < gradient.numel:
            spare = torch.empty(gradient.numel, dtype=dtype, device=like.device)
        self._spare = spare.new_empty(0).set_(spare.untyped_storage(), 0, (gradient.numel,), (1,))
        return self._spare

    def _with_momentum(self, gradient: Gradient) -> Tensor:
        grad = self.joined(gradient)
        if not self._momentum:
            return grad
        return self._velocities.get(gradient.layout, grad).mul_(self._momentum).add_(grad)


@dataclass(frozen=True)
class _Prepared:
    """The next residual of a layout."""

    layout: Layout
    vector: Tensor
    energy: float  # sum of squares


def _room(vector: Tensor) -> int:
    """How many entries fit into the memory that a vector is the front of."""
    return vector.untyped_storage().nbytes() // vector.element_size()


class ByName:
    """A vector per parameter, stored flat in the layout it was last used in.

    DDP re-arranges its buckets after the first iterations: when a name turns up in another layout, its vector moves
    there with it.
    """

    def __init__(self, vectors: Mapping[str, Tensor] | None = None) -> None:
        self._flat: dict[Layout, Tensor] = {}
        self._home: dict[str, Layout] = {}
        self.remembered: dict[Layout, Tensor] = {}
        for name, vector in (vectors or {}).items():
            layout = ((name, vector.numel()),)
            self._flat[layout] = vector.detach().clone().flatten()
            self._home[name] = layout

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def get(self, layout: Layout, like: Tensor) -> Tensor:
        """The flat vector of a layout, gathered from wherever its parts are; zeros for names not seen before.

        It is on the device of `like`, in the precision that suits it.
        """
        flat = self.at(layout, like)
        return flat if flat is not None else self._move_into(layout, like)

    def at(self, layout: Layout, like: Tensor) -> Tensor | None:
        """As `get`, if nothing has to be moved for it."""
        flat = self._flat.get(layout)
        fits = flat is not None and flat.dtype == residual_dtype(like.dtype) and flat.device == like.device
        return flat if fits else None

    def is_at(self, layout: Layout) -> bool:
        """Whether every name of this layout has its vector there, and not in another."""
        return all(self._home.get(name) == layout for name, _ in layout)

    def flat(self, layout: Layout) -> Tensor:
        return self._flat[layout]

    def exchange(self, layout: Layout, vector: Tensor) -> Tensor:
        """Put another vector in the place of a layout's; the one that was there."""
        before, self._flat[layout] = self._flat[layout], vector
        return before

    def view(self, name: str) -> Tensor:
        layout = self._home[name]
        start = 0
        for other, numel in layout:
            if other == name:
                return self._flat[layout][start : start + numel]
            start += numel
        raise AssertionError(f"{name} is not in its own layout")

    def take(self, names: Collection[str]) -> dict[str, Tensor]:
        """A copy of the vectors of `names`, which are zero from now on."""
        taken = {name: self.view(name).clone() for name in names if name in self}
        for name in taken:
            self.view(name).zero_()
        return taken

    def give_back(self, taken: Mapping[str, Tensor]) -> None:
        for name, vector in taken.items():
            self.view(name).copy_(vector)

    def scale_(self, factor: float) -> None:
        for flat in self._flat.values():
            flat.mul_(factor)

    def remember(self, layout: Layout, like: Tensor, memory: Tensor | None = None) -> None:
        """Keep a copy for `undo`, in this memory if it suits."""
        now = self.get(layout, like)
        suits = memory is not None and memory.dtype == now.dtype and memory.device == now.device
        self.remembered[layout] = memory.copy_(now) if memory is not None and suits else now.clone()

    def undo(self) -> None:
        for layout, flat in self.remembered.items():
            self._flat[layout].copy_(flat)
        self.remembered.clear()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self.view(name).clone() for name in self._home}

    def _move_into(self, layout: Layout, like: Tensor) -> Tensor:
        total = sum(numel for _, numel in layout)
        moved = torch.zeros(total, dtype=residual_dtype(like.dtype), device=like.device)
        start = 0
        for name, numel in layout:
            if name in self._home:
                moved[start : start + numel] = self.view(name)
            start += numel
        self._home |= dict.fromkeys((name for name, _ in layout), layout)
        self._flat[layout] = moved
        in_use = set(self._home.values())
        self._flat = {known: flat for known, flat in self._flat.items() if known in in_use}
        return moved


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Residuals are kept in float32, or float64 for float64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32
