"""Kernels of a device against the specification, on inputs that break selection code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import isfinite

import torch
from torch import Tensor

from oktopk.kernels import Kernels, ReferenceKernels
from oktopk.types import Difference

KINDS = ("normal", "ties", "zeros", "tiny", "in one place")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 1000, 70_001, 3_000_003)
PIECES = 5
_CLOSE = 1e-6  # of sums whose order is not fixed


@dataclass(frozen=True)
class Case:
    """A residual and a gradient, on the host."""

    numel: int
    kind: str
    dtype: torch.dtype

    @property
    def k(self) -> int:
        return max(1, self.numel // 100)

    def vectors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.numel)
        residual, grad = (torch.randn(self.numel, generator=generator) for _ in range(2))
        if self.kind == "ties":
            residual, grad = residual.round(), grad.round()
        elif self.kind == "zeros":
            residual, grad = (x * (torch.rand(self.numel, generator=generator) < 0.005) for x in (residual, grad))
        elif self.kind == "tiny":
            residual, grad = residual * 1e-39, grad * 1e-39
        elif self.kind == "in one place":
            residual[self.numel // 150 :] *= 1e-6
            grad[self.numel // 150 :] *= 1e-6
        return residual, grad.to(self.dtype)


def cases(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    for numel, kind, dtype in product(sizes, KINDS, DTYPES):
        yield Case(numel, kind, dtype)


def disagreements(kernels: Kernels, device: torch.device, case: Case) -> list[str]:
    """What differs from plain torch on the host, in a step on one tensor, one on pieces, and one of updates."""
    spec, host, different = ReferenceKernels(), torch.device("cpu"), []
    for way in (_flat, _scattered, _updates):
        ours, theirs = way(kernels, device, case), way(spec, host, case)
        different += [f"{way.__name__[1:]}: {name}" for name in theirs if not _same(ours[name], theirs[name])]
    return different


Outcome = dict[str, Tensor | float]


def _flat(kernels: Kernels, device: torch.device, case: Case) -> Outcome:
    residual, grad = (x.to(device) for x in case.vectors())
    energy = kernels.accumulate_(residual, grad, case.k)
    found: Outcome = {"sum": residual.cpu(), "energy": energy}
    chosen, threshold = kernels.select_topk(residual, case.k)
    found |= {"indices": chosen.indices, "values": chosen.values, "threshold": threshold}
    above = kernels.select_above(residual, threshold)
    found |= {"above": above.indices, "count": float(kernels.count_above(residual, threshold))}
    found["change"] = kernels.retain_(residual, chosen.with_values(chosen.values / 2))
    kernels.fill_([grad], chosen)
    picked = kernels.pick(residual, chosen.indices)
    return found | {"retained": residual.cpu(), "filled": grad.cpu(), "picked": picked.values}


def _scattered(kernels: Kernels, device: torch.device, case: Case) -> Outcome:
    residual, grad = (x.to(device) for x in case.vectors())
    pieces, out = [part.clone() for part in grad.tensor_split(PIECES)], torch.empty_like(residual)
    energy = kernels.add(out, residual, pieces, case.k)
    chosen, _ = kernels.select_topk(out, case.k)
    kernels.fill_(pieces, chosen)
    bad = [torch.where(torch.arange(piece.numel(), device=device) == 0, torch.nan, piece) for piece in pieces]
    is_told = float(not isfinite(kernels.add(out, residual, bad, case.k)))
    return {"energy": energy, "indices": chosen.indices, "filled": torch.cat(pieces).cpu(), "bad": is_told}


def _updates(kernels: Kernels, device: torch.device, case: Case) -> Outcome:
    shared, change = (x.float().to(device) for x in case.vectors())
    own = tuple(part.clone() for part in (shared - change).tensor_split(PIECES))
    difference = Difference(shared, own)
    energy = kernels.scan(difference, case.k)
    chosen, _ = kernels.select_topk(difference, case.k)
    kernels.move_(difference, chosen.with_values(chosen.values / 2), chosen)
    return {"energy": energy, "indices": chosen.indices, "shared": shared.cpu()}


def _same(ours: Tensor | float, theirs: Tensor | float) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return abs(float(ours) - float(theirs)) <= _CLOSE * max(1.0, abs(float(theirs)))
