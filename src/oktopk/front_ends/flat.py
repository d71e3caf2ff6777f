"""Gradients of parameters, copied into flat buckets and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class FlatBucket:
    """Some parameters, and one vector for all their gradients."""

    parameters: tuple[Named, ...]
    flat: Tensor

    @property
    def layout(self) -> list[tuple[str, int]]:
        return [(name, parameter.numel()) for name, parameter in self.parameters]

    @property
    def unused(self) -> frozenset[str]:
        """Names of parameters without a gradient."""
        return frozenset(name for name, parameter in self.parameters if parameter.grad is None)

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        parts = self.flat.split([parameter.numel() for _, parameter in self.parameters])
        for (name, parameter), part in zip(self.parameters, parts, strict=True):
            yield name, parameter, part.view(parameter.shape)

    def gather(self, factor_of: Callable[[nn.Parameter], float]) -> None:
        """Copy every gradient times a factor; zeros where there is none."""
        for _, parameter, part in self.pieces():
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad).mul_(factor_of(parameter))

    def scatter(self, factor_of: Callable[[nn.Parameter], float], skip: Container[str]) -> None:
        """Copy every part times a factor back into its gradient, except for the names in `skip`."""
        for name, parameter, part in self.pieces():
            if name in skip:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part).mul_(factor_of(parameter))


def in_buckets(parameters: Sequence[Named], limit: float) -> list[FlatBucket]:
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


def in_one_bucket(parameters: Sequence[Named]) -> list[FlatBucket]:
    return [_bucket(parameters)]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _bucket(group: Sequence[Named]) -> FlatBucket:
    dtype = reduce(torch.promote_types, (parameter.dtype for _, parameter in group))
    numel = sum(parameter.numel() for _, parameter in group)
    return FlatBucket(tuple(group), torch.zeros(numel, dtype=dtype, device=group[0][1].device))
