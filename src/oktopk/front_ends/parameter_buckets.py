"""Gradients of parameters, handed over in buckets where they lie."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from oktopk.front_ends.parameters import Named


@dataclass(frozen=True)
class ParameterBucket:
    """Some parameters whose gradients are reduced as one vector."""

    parameters: tuple[Named, ...]
    dtype: torch.dtype  # of the vector
    _pieces: list[Tensor] = field(default_factory=list)  # under way

    @property
    def layout(self) -> list[tuple[str, int]]:
        return [(name, parameter.numel()) for name, parameter in self.parameters]

    @property
    def unused(self) -> frozenset[str]:
        """Names of parameters without a gradient."""
        return frozenset(name for name, parameter in self.parameters if parameter.grad is None)

    def take(self, factor_of: Callable[[nn.Parameter], float]) -> list[Tensor]:
        """Every gradient times a factor, flat: its own memory where that is possible, zeros where there is none."""
        self._pieces[:] = [self._piece(parameter, factor_of(parameter)) for _, parameter in self.parameters]
        return self._pieces

    def hand_back(self, factor_of: Callable[[nn.Parameter], float], skip: Container[str]) -> None:
        """Every piece times a factor is the gradient again, except for the names in `skip`."""
        for (name, parameter), piece in zip(self.parameters, self._pieces, strict=True):
            if name in skip:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.data_ptr() != piece.data_ptr():
                parameter.grad.copy_(piece.view(parameter.shape))
            if (factor := factor_of(parameter)) != 1.0:
                parameter.grad.mul_(factor)
        self._pieces.clear()

    def _piece(self, parameter: nn.Parameter, factor: float) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(parameter.numel(), dtype=self.dtype, device=parameter.device)
        piece = parameter.grad.detach().to(self.dtype).reshape(-1)
        return piece if factor == 1.0 else piece.mul_(factor)


def in_buckets(parameters: Sequence[Named], limit: float) -> list[ParameterBucket]:
    """Parameters from last to first, as backward finishes them, in buckets of one dtype and at most `limit` bytes."""
    groups: list[list[Named]] = []
    size = 0
    for name, parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        if not groups or size + nbytes > limit or not _alike(groups[-1][0][1], parameter):
            groups.append([])
            size = 0
        groups[-1].append((name, parameter))
        size += nbytes
    return [_bucket(group) for group in groups]


def in_one_bucket(parameters: Sequence[Named]) -> list[ParameterBucket]:
    return [_bucket(parameters)]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _bucket(group: Sequence[Named]) -> ParameterBucket:
    return ParameterBucket(tuple(group), reduce(torch.promote_types, (parameter.dtype for _, parameter in group)))
