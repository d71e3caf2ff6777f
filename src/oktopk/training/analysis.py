"""What the selection did to one gradient, against what a perfect selection would have done.

Each analysis costs two dense all-reduces: it is for looking, not for every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.training.world import World

_BINS = 60
_DECADES = 8  # magnitudes from the largest down


@dataclass(frozen=True)
class Histogram:
    """Counts of magnitudes between edges that grow by a constant factor; smaller ones fall into the first bin."""

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class Analysis:
    """One analysed step; every fraction is absent when its denominator is zero."""

    step: int
    histogram_before: Histogram  # of this rank's gradient plus residual
    histogram_after: Histogram  # of the entries that were chosen
    density_by_parameter: Mapping[str, float]
    overlap_count: float | None
    overlap_energy: float | None
    xi: float | None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Analyzer:
    """Sees the gradients of a model before and after they are reduced."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def before(self, residuals: Mapping[str, Tensor], clip: float = 1.0, unit: float = 1.0) -> None:
        """Remember what goes into the reduction: gradients times `clip`, and residuals, which come in `unit`s."""
        gradient = self._gradient() * clip
        owed = [residuals.get(name, torch.zeros_like(p)).reshape(-1) for name, p in self._parameters]
        # After a resume, residuals are still on the host.
        self._mine = gradient + torch.cat(owed).to(gradient.device, gradient.dtype) / unit
        self._mean_gradient, self._mean_input = gradient.clone(), self._mine.clone()
        self._world.average_([self._mean_gradient, self._mean_input])

    def after(self, step: int, k: int) -> Analysis:
        """Compare with what came out; `k` is the number of entries that were wanted."""
        result = self._gradient()
        chosen = result != 0
        exact = largest(self._mean_input, int(chosen.sum()))
        wanted = torch.where(largest(self._mean_input, k), self._mean_input, 0)
        edges = magnitude_edges(self._mine)
        return Analysis(
            step=step,
            histogram_before=histogram(self._mine, edges),
            histogram_after=histogram(result[chosen], edges),
            density_by_parameter=self._densities(chosen),
            overlap_count=ratio(float((chosen & exact).sum()), float(exact.sum())),
            overlap_energy=ratio(energy(self._mean_input[chosen & exact]), energy(self._mean_input[exact])),
            xi=ratio(energy(wanted - result) ** 0.5, energy(self._mean_gradient) ** 0.5),
        )

    def _densities(self, chosen: Tensor) -> dict[str, float]:
        parts = chosen.split([parameter.numel() for _, parameter in self._parameters])
        return {name: float(part.float().mean()) for (name, _), part in zip(self._parameters, parts, strict=True)}

    def _gradient(self) -> Tensor:
        """All gradients, one after the other."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in self._parameters]
        return torch.cat([gradient.detach().flatten() for gradient in gradients])


def largest(vector: Tensor, k: int) -> Tensor:
    """Mask of the k entries of largest magnitude."""
    mask = torch.zeros(vector.numel(), dtype=torch.bool, device=vector.device)
    mask[vector.abs().topk(min(k, vector.numel())).indices] = True
    return mask


def energy(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def magnitude_edges(vector: Tensor) -> list[float]:
    top = float(vector.abs().max()) or 1.0
    steps = torch.linspace(-_DECADES, 0, _BINS + 1, dtype=torch.float64)
    return [float(edge) for edge in top * 1.001 * 10**steps]


def histogram(vector: Tensor, edges: Sequence[float]) -> Histogram:
    borders = torch.tensor(edges, dtype=torch.float64, device=vector.device)
    places = torch.bucketize(vector.abs().double(), borders) - 1
    counts = torch.bincount(places.clamp(0, len(edges) - 2), minlength=len(edges) - 1)
    return Histogram(list(edges), [int(count) for count in counts.tolist()])
