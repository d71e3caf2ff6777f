"""The weights that all ranks share, those of this rank in the model, and how they change places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.errors import CheckpointError
from oktopk.front_ends.broadcast import broadcast_
from oktopk.front_ends.buffers import StillBuffers
from oktopk.front_ends.local_state import plain, reduced_from
from oktopk.front_ends.weights import Weights, weights_of
from oktopk.reducer import Reducer
from oktopk.reduction.gradient import Gradient
from oktopk.reduction.updates import Updates


class SharedWeights:
    """Vectors of a model's weights, each of which is shared: parameters that are trained, and buffers that move."""

    def __init__(self, module: nn.Module, reducer: Reducer) -> None:
        self._module, self._reducer = module, reducer
        self.trained = list(weights_of(module))
        self._moving: list[Weights] = []  # buffers that are averaged
        self._still = StillBuffers(module)
        self._set_aside: dict[int, tuple[Tensor, ...]] = {}  # own weights of 16 bits, while the shared ones are lent
        self.is_lent = False
        self.begin()

    @property
    def updates(self) -> Updates:
        feedback = self._reducer._pipeline.feedback
        assert isinstance(feedback, Updates)
        return feedback

    @property
    def vectors(self) -> list[Weights]:
        return [*self.trained, *self._moving]

    def begin(self) -> None:
        """Everyone's weights and buffers are those of rank 0, frozen ones and whole numbers too; nothing is owed."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._reducer.communicate(lambda transport: broadcast_(tensors, transport))
        self._moving = []
        self._still.restart()
        self.share_own()

    def share_own(self) -> None:
        """Own weights are the shared ones."""
        for vector in self.vectors:
            self.updates.begin(vector.own())

    def find_moving(self) -> None:
        """Average buffers that some rank has written, from now on. All ranks look together."""
        self._share_buffers(self._reducer.communicate(self._still.moved))

    def _share_buffers(self, names: Sequence[str]) -> None:
        for vector, before in self._still.take(names):
            self.updates.begin(before)
            self._moving.append(vector)

    def written(self) -> list[int]:
        """Counts the writes to each parameter that torch sees."""
        return [tensor._version for vector in self.trained for tensor in vector.tensors]

    def owed(self) -> dict[str, Tensor]:
        """A copy of what this rank has changed and not sent, by name."""
        parts: dict[str, Tensor] = {}
        with self._own():
            for vector in self.vectors:
                parts |= vector.by_name(self.updates.owed(vector.own()))
        return parts

    # -- lending -------------------------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the model holds the shared weights."""
        self._exchange()
        self.is_lent = True
        try:
            yield
        finally:
            self.is_lent = False
            self._exchange()

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Inside, the model holds this rank's own weights, also while the shared ones are lent to it."""
        if self.is_lent:
            self._exchange()
        try:
            yield
        finally:
            if self.is_lent:
                self._exchange()

    def _exchange(self) -> None:
        """Own and shared weights change places, a tensor at a time."""
        for index, vector in enumerate(self.vectors):
            own = vector.own()
            shared = self.updates.shared(own.layout)
            if shared.dtype != own.dtype:
                self._exchange_rounded(index, own, shared)
                continue
            for piece, part in zip(own.pieces, _split(shared, own), strict=True):
                before = piece.clone()
                piece.copy_(part)
                part.copy_(before)

    def _exchange_rounded(self, index: int, own: Gradient, shared: Tensor) -> None:
        """Weights of 16 bits cannot hold the shared ones, which stay where they are."""
        aside = self._set_aside.pop(index, None)
        if aside is None:
            self._set_aside[index] = tuple(piece.clone() for piece in own.pieces)
            aside = _split(shared, own)
        for piece, part in zip(own.pieces, aside, strict=True):
            piece.copy_(part)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_shared: bool) -> dict[str, Any]:
        """With or without what is the same on every rank."""
        with self._own():
            weights = [self._state_of(vector, with_shared) for vector in self.vectors]
        return {"weights": weights, "still": self._still.state_dict() if with_shared else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._still.load_state_dict(state["still"])
        self._moving = []
        for saved in state["weights"][len(self.trained) :]:
            self._share_buffers(self._still.known(saved["own"]))
        if len(state["weights"]) != len(self.vectors):
            raise CheckpointError("this state is of another model: it has other dtypes or buffers.")
        for vector, saved in zip(self.vectors, state["weights"], strict=True):
            self._restore(vector, saved)

    def _state_of(self, vector: Weights, with_shared: bool) -> dict[str, Any]:
        own = vector.own()
        return {
            "own": vector.by_name(torch.cat(own.pieces)),
            "owed": vector.by_name(self.updates.owed(own)),
            "shared": vector.by_name(self.updates.shared(own.layout)) if with_shared else {},
            "arrived": plain(self.updates.arrived(own.layout)),
        }

    def _restore(self, vector: Weights, saved: Mapping[str, Any]) -> None:
        own = vector.own()
        if {name: part.numel() for name, part in saved["own"].items()} != dict(own.layout):
            raise CheckpointError("this state is of another model: its parameters have other names or shapes.")
        names = [name for name, _ in own.layout]
        for name, piece in zip(names, own.pieces, strict=True):
            piece.copy_(saved["own"][name])
        shared, owed = (torch.cat([saved[part][name] for name in names]) for part in ("shared", "owed"))
        self.updates.restore(own, shared, owed)
        self.updates.resume_arrived(own.layout, reduced_from(saved["arrived"], own.numel))


def _split(vector: Tensor, like: Gradient) -> tuple[Tensor, ...]:
    return tuple(vector.split([piece.numel() for piece in like.pieces]))
