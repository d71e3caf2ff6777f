"""Kernels that go by where a vector lies."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.kernels.choice import Choice, choose
from oktopk.kernels.staged import SparseOnHost
from oktopk.types import Difference, Source, SparseVector

log = logging.getLogger("oktopk")

_HOST = torch.device("cpu")


class KernelsByDevice(SparseOnHost):
    """Those that `choose` gives for the device of a vector, chosen when the first one comes along.

    Sparse vectors are always on the host: see `kernels/staged.py`.
    """

    name = "by device"

    def __init__(self) -> None:
        self._choices: dict[torch.device, Choice] = {_HOST: choose(_HOST)}
        self._host = self._choices[_HOST].kernels

    def of(self, device: torch.device) -> Kernels:
        if device not in self._choices:
            self._choices[device] = choice = choose(device)
            if device.type != "cpu" and choice.kernels.name == "reference":
                log.warning("gradients on %s are selected by plain torch, which is slower: %s.", device, choice.reason)
        return self._choices[device].kernels

    def all_below(self, pieces: Sequence[Tensor], limit: float) -> bool:
        return self.of(pieces[0].device).all_below(pieces, limit)

    def accumulate_(self, residual: Tensor, grad: Tensor, k: int = 0) -> float:
        return self.of(residual.device).accumulate_(residual, grad, k)

    def add(self, out: Tensor, residual: Tensor, pieces: Sequence[Tensor], k: int = 0) -> float:
        return self.of(out.device).add(out, residual, pieces, k)

    def scan(self, difference: Difference, k: int = 0) -> float:
        return self.of(difference.device).scan(difference, k)

    def glance(self, difference: Difference) -> float:
        return self.of(difference.device).glance(difference)

    def select_topk(self, x: Source, k: int) -> tuple[SparseVector, float]:
        return self.of(x.device).select_topk(x, k)

    def select_above(self, x: Tensor, threshold: float) -> SparseVector:
        return self.of(x.device).select_above(x, threshold)

    def count_above(self, x: Tensor, threshold: float) -> int:
        return self.of(x.device).count_above(x, threshold)

    def pick(self, x: Source, indices: Tensor) -> SparseVector:
        return self.of(x.device).pick(x, indices)

    def retain_(self, residual: Tensor, sent: SparseVector) -> float:
        return self.of(residual.device).retain_(residual, sent)

    def move_(self, difference: Difference, mean: SparseVector, sent: SparseVector) -> float:
        return self.of(difference.device).move_(difference, mean, sent)

    def fill_(self, pieces: Sequence[Tensor], vector: SparseVector) -> None:
        self.of(pieces[0].device).fill_(pieces, vector)
