"""The weights that all ranks share, those of this rank in the model, and how they change places."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.errors import CheckpointError, OkTopkError
from oktopk.front_ends.broadcast import broadcast_
from oktopk.front_ends.buffers import StillBuffers
from oktopk.front_ends.local_state import forgetting, keeping, plain, reduced_from
from oktopk.front_ends.weights import Weights, flat, weights_of
from oktopk.reducer import Reducer
from oktopk.reduction.gradient import Gradient
from oktopk.reduction.parts import join, parts_of
from oktopk.reduction.updates import Updates

log = logging.getLogger("oktopk")


class SharedWeights:
    """Vectors of a model's weights, each of which is shared: parameters that are trained, and buffers that move."""

    def __init__(self, module: nn.Module, reducer: Reducer) -> None:
        self._module, self._reducer = module, reducer
        self._parts = parts_of(reducer.hosts.ranks_per_host)  # of each vector, one of which each rank of a host reduces
        self.trained = list(weights_of(module))
        self.moving: list[Weights] = []  # buffers that are averaged
        self._still = StillBuffers(module)
        self._set_aside: dict[int, tuple[Tensor, ...]] = {}  # own weights of 16 bits, while the shared ones are lent
        self.is_lent = False
        self.was_written = False  # by somebody else, while they were lent the last time
        self._as_lent = self.written()
        self.begin()

    @property
    def updates(self) -> Updates:
        feedback = self._reducer._pipeline.feedback
        assert isinstance(feedback, Updates)
        return feedback

    @property
    def vectors(self) -> list[Weights]:
        return [*self.trained, *self.moving]

    @property
    def _buffers(self) -> list[Tensor]:
        return [tensor for vector in self.moving for tensor in vector.tensors]

    def begin(self) -> None:
        """Everyone's weights and buffers are those of rank 0, frozen ones and whole numbers too; nothing is owed."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._reducer.communicate(lambda transport: broadcast_(tensors, transport))
        self.moving = []
        self._still.restart()
        self.share_own()

    def share_own(self) -> None:
        """Own weights are the shared ones."""
        for vector in self.vectors:
            self._begin(vector.own())

    def forget_owed(self) -> None:
        """Own weights are the shared ones; what they contained is owed beside them."""
        for vector in self.trained:
            for part in self._split(vector.own()):
                self.updates.follow(part)

    def rest(self) -> None:
        """Own weights that are not finite are what they were: this rank sits out what made them so."""
        for vector in self.vectors:
            for part in self._split(vector.own()):
                self.updates.rest_(part)

    def _begin(self, own: Gradient) -> None:
        for part in self._split(own):
            self.updates.begin(part)

    def _split(self, own: Gradient) -> list[Gradient]:
        return [part.gradient(own) for part in self._parts]

    def find_moving(self) -> None:
        """Average buffers that some rank has written, from now on. All ranks look together."""
        if not self._reducer.hosts.is_flat:
            self._check_hosts()
        self._share_buffers(self._reducer.communicate(self._still.moved))

    def _check_hosts(self) -> None:
        """Ranks of a host must have the same weights, or what one tells of its part is not true of the others'."""
        mine = [sum(_bits(tensor) for vector in self.trained for tensor in vector.tensors) % 2**62]
        everyone = self._reducer.communicate(lambda transport: transport.agree(mine))
        for ranks in self._reducer.hosts.ranks:
            if any(everyone[rank] != everyone[ranks[0]] for rank in ranks):
                raise OkTopkError(
                    f"ranks {', '.join(map(str, ranks))} are one host and one worker, and have come to different "
                    "weights: gradients must not be changed by one of them after they were averaged, and a "
                    "step must not depend on the rank. Or pass hosts=None."
                )

    def _share_buffers(self, names: Sequence[str]) -> None:
        for vector, before in self._still.take(names):
            self._begin(before)
            self.moving.append(vector)

    def written(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """What changes when someone writes to a parameter, as far as torch sees it, or puts its entries elsewhere."""
        tensors = [tensor for vector in self.trained for tensor in vector.tensors]
        return [(tensor._version, tensor.data_ptr(), tensor.stride()) for tensor in tensors]

    def owed(self) -> dict[str, Tensor]:
        """A copy of what this rank has changed and not sent, by name."""
        parts: dict[str, Tensor] = {}
        with self._own():
            for vector in self.vectors:
                parts |= self._joined(vector, self.updates.owed)
        return parts

    def _joined(self, vector: Weights, of_part: Callable[[Gradient], Tensor]) -> dict[str, Tensor]:
        """By name, what all parts of a vector have; a copy."""
        parts = self._split(vector.own())
        slices = [zip((name for name, _ in part.layout), part.cut(of_part(part)), strict=True) for part in parts]
        return join([{name: piece.clone() for name, piece in pairs} for pairs in slices])

    # -- lending -------------------------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the model holds the shared weights."""
        self._exchange()
        self.is_lent, self.was_written, self._as_lent = True, False, self.written()
        buffers = [tensor.clone() for tensor in self._buffers]
        try:
            yield
        finally:
            self._look()
            _undo_writes(self._buffers, buffers)
            self.is_lent = False
            self._exchange()

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Inside, the model holds this rank's own weights, also while the shared ones are lent to it."""
        if not self.is_lent:
            yield
            return
        self._look()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._as_lent = self.written()

    def _look(self) -> None:
        """Whether somebody has written to the shared weights that are lent."""
        self.was_written |= self.written() != self._as_lent

    def _exchange(self) -> None:
        """Own and shared weights change places, a tensor at a time."""
        for index, own in enumerate(part for vector in self.vectors for part in self._split(vector.own())):
            shared = self.updates.shared(own.layout)
            if shared.dtype != own.dtype:
                self._exchange_rounded(index, own, shared)
                continue
            for piece, part in zip(own.pieces, own.cut(shared), strict=True):
                before = piece.clone()
                piece.copy_(part)
                part.copy_(before)

    def _exchange_rounded(self, index: int, own: Gradient, shared: Tensor) -> None:
        """Weights of 16 bits cannot hold the shared ones, which stay where they are."""
        aside = self._set_aside.pop(index, None)
        if aside is None:
            self._set_aside[index] = tuple(piece.clone() for piece in own.pieces)
            aside = own.cut(shared)
        for piece, part in zip(own.pieces, aside, strict=True):
            piece.copy_(part)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_shared: bool, with_own: bool = True) -> dict[str, Any]:
        """With or without what is the same on every rank, and what is on every rank of a host."""
        with self._own():
            weights = [self._state_of(vector, with_shared, with_own or vector.dense) for vector in self.vectors]
        return {"weights": weights, "still": self._still.state_dict() if with_shared else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._still.load_state_dict(state["still"])
        self.moving = []
        for saved in state["weights"][len(self.trained) :]:
            self._share_buffers(self._still.known(saved["own"]))
        if len(state["weights"]) != len(self.vectors):
            raise CheckpointError("this state is of another model: it has other dtypes or buffers.")
        for vector, saved in zip(self.vectors, state["weights"], strict=True):
            self._restore(vector, saved)

    def _state_of(self, vector: Weights, with_shared: bool, with_own: bool) -> dict[str, Any]:
        own = vector.own()
        is_flat = len(self._parts) == 1  # between ranks of a host nothing is ever under way
        keeps = self.updates.keeps_all
        return {
            "own": vector.by_name(torch.cat(own.pieces)) if with_own else {},
            "owed": self._joined(vector, self.updates.owed) if with_own and keeps else {},
            "forgotten": self._joined(vector, self.updates.forgotten) if with_own and not keeps else {},
            "kept": self.updates.kept(self._split(own)[0]),
            "shared": self._joined(vector, lambda part: self.updates.shared(part.layout)) if with_shared else {},
            "arrived": plain(self.updates.arrived(own.layout)) if is_flat else {},
        }

    def _restore(self, vector: Weights, saved: Mapping[str, Any]) -> None:
        own = vector.own()
        if {name: part.numel() for name, part in saved["own"].items()} != dict(own.layout):
            raise CheckpointError("this state is of another model: its parameters have other names or shapes.")
        names = [name for name, _ in own.layout]
        saved, beside = (keeping(saved), "owed") if self.updates.keeps_all else (forgetting(saved), "forgotten")
        for name, piece in zip(names, own.pieces, strict=True):
            piece.copy_(saved["own"][name])
        shared, owed = (Gradient.of(own.layout, [saved[of][name] for name in names]) for of in ("shared", beside))
        parts = zip(self._split(own), self._split(shared), self._split(owed), strict=True)
        for part, of_shared, of_owed in parts:
            shared_part, beside_part = torch.cat(of_shared.pieces), torch.cat(of_owed.pieces)
            self.updates.restore(part, shared_part, beside_part, saved.get("kept", 0.0))
        if len(self._parts) == 1:
            self.updates.resume_arrived(own.layout, reduced_from(saved["arrived"], own.numel))


def _undo_writes(buffers: Sequence[Tensor], lent: Sequence[Tensor]) -> None:
    """Buffers become what they were when they were lent: a rank that writes to shared ones would be alone with that."""
    written = [(now, before) for now, before in zip(buffers, lent, strict=True) if not torch.equal(now, before)]
    for tensor, before in written:
        tensor.copy_(before)
    if written:
        log.warning(
            "%d buffers were written inside handle.shared(), and are what they were: call model.eval() there.",
            len(written),
        )


def _bits(tensor: Tensor) -> int:
    """A sum of its bits, as whole numbers."""
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat(tensor).view(widths[tensor.element_size()]).sum(dtype=torch.int64))
