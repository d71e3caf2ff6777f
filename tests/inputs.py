"""Gradients to be reduced: every kind that has broken someone's implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient(kind: str, numel: int, rank: int, step: int) -> Tensor:
    """The gradient of one rank at one step; the same call gives the same tensor."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return KINDS[kind](numel, generator, rank)


def _normal(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    return torch.randn(numel, generator=generator)


def _heavy(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    # Student t with 1.5 degrees of freedom: the variance is infinite.
    scale = torch._standard_gamma(torch.full((numel,), 0.75), generator=generator) / 0.75
    return _normal(numel, generator, rank) / scale.sqrt().clamp(min=1e-6)


def _layers(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    # Twenty layers whose scales are log-normal and the same on all ranks and steps.
    scales = torch.randn(20, generator=torch.Generator().manual_seed(7)).mul(1.5).exp()
    layer = torch.arange(numel) * 20 // max(1, numel)
    return _normal(numel, generator, rank) * scales[layer]


def _mostly_zero(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    keep = torch.rand(numel, generator=generator) < 0.001
    return _normal(numel, generator, rank) * keep


def _tied(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    return torch.full((numel,), -0.5)


def _one_layer(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    grad = torch.zeros(numel)
    start, end = numel // 2, numel // 2 + max(1, numel // 50)
    grad[start:end] = _normal(numel, generator, rank)[start:end]
    return grad


def _zero(numel: int, generator: torch.Generator, rank: int) -> Tensor:
    return torch.zeros(numel)


KINDS = {
    "normal": _normal,
    "heavy": _heavy,
    "layers": _layers,
    "mostly_zero": _mostly_zero,
    "tied": _tied,
    "one_layer": _one_layer,
    "zero": _zero,
}
