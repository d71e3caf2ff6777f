"""What is still owed: the residual of every parameter, shared by all algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.types import SparseVector, Vector

Layout = tuple[tuple[str, int], ...]  # (parameter name, numel) in the order they lie in a flat bucket


class Feedback:
    """Residuals, keyed by parameter name and stored flat in the layout they were last used in.

    DDP re-arranges its buckets after the first iterations: when a name turns up in another layout, its residual moves
    there with it.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._flat: dict[Layout, Tensor] = {}
        self._home: dict[str, Layout] = {}
        self._energy: dict[Layout, float] = {}  # sum of squares

    def compensate(self, layout: Layout, grad: Tensor) -> Tensor:
        """The gradient plus what is owed. The result is the residual itself: `retain` says what left it."""
        residual = self._residual(layout, grad)
        self._energy[layout] = self._kernels.accumulate_(residual, grad)
        return residual

    def retain(self, layout: Layout, sent: Vector | None) -> None:
        """Everything not in `sent` stays owed."""
        residual = self._flat[layout]
        if sent is None:
            residual.zero_()
            self._energy[layout] = 0.0
        elif isinstance(sent, SparseVector):
            self._energy[layout] += self._kernels.retain_(residual, sent)
        else:
            residual.sub_(sent)
            self._energy[layout] = float(residual.double().square().sum())

    def owes(self, layout: Layout) -> bool:
        """Whether any parameter of this layout has a residual."""
        return any(name in self._home for name, _ in layout)

    def norm(self, layout: Layout) -> float:
        return math.sqrt(max(0.0, self._energy.get(layout, 0.0)))

    def scale_(self, factor: float) -> None:
        """Multiply every residual: the unit of the gradient has changed."""
        for layout, residual in self._flat.items():
            residual.mul_(factor)
            self._energy[layout] = self._energy.get(layout, 0.0) * factor * factor

    def state_dict(self) -> dict[str, Tensor]:
        """A flat copy of every residual, by parameter name."""
        return {name: self._view(name).clone() for name in self._home}

    def load_state_dict(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace everything; each name moves into its bucket when that is next reduced."""
        self._flat, self._home, self._energy = {}, {}, {}
        for name, residual in residuals.items():
            layout = ((name, residual.numel()),)
            self._flat[layout] = residual.detach().clone().flatten()
            self._home[name] = layout

    def _residual(self, layout: Layout, grad: Tensor) -> Tensor:
        residual = self._flat.get(layout)
        if residual is None or residual.dtype != residual_dtype(grad.dtype):
            residual = self._move_into(layout, grad)
        return residual

    def _move_into(self, layout: Layout, grad: Tensor) -> Tensor:
        residual = torch.zeros(grad.numel(), dtype=residual_dtype(grad.dtype), device=grad.device)
        start = 0
        for name, numel in layout:
            if name in self._home:
                residual[start : start + numel] = self._view(name)
            start += numel
        self._home |= dict.fromkeys((name for name, _ in layout), layout)
        self._flat[layout] = residual
        in_use = set(self._home.values())
        self._flat = {known: flat for known, flat in self._flat.items() if known in in_use}
        return residual

    def _view(self, name: str) -> Tensor:
        layout = self._home[name]
        start = 0
        for other, numel in layout:
            if other == name:
                return self._flat[layout][start : start + numel]
            start += numel
        raise AssertionError(f"{name} is not in its own layout")


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Residuals are kept in float32, or float64 for float64 gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32
