"""DiLoCo (Douillard et al., 2023, arXiv 2311.08105): dense means of many local steps, and an outer Nesterov step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from oktopk.bench.rivals.base import end_, mean_
from oktopk.transport.base import Transport


class DiLoCo:
    """The mean change of weights is the gradient of an outer optimizer; ranks go on from where that leads."""

    levels = True

    def __init__(
        self,
        start: Tensor,
        shapes: Sequence[Size],
        transport: Transport,
        rate: float = 0.7,  # of the outer step (paper: 0.7); 1 with momentum 0: plain averaging
        momentum: float = 0.9,  # of the outer step, Nesterov's (paper: 0.9)
    ) -> None:
        self._transport = transport
        self._shared, self._velocity = start.clone(), torch.zeros_like(start)
        self._rate, self._momentum = rate, momentum

    def synchronize_(self, own: Tensor) -> None:
        change = mean_(self._shared - own, self._transport)
        self._velocity.mul_(self._momentum).add_(change)
        self._shared.sub_(change + self._momentum * self._velocity, alpha=self._rate)
        own.copy_(self._shared)

    def finish_(self, own: Tensor) -> None:
        """The last steps that no outer step followed are averaged as they are."""
        end_(own, self._shared, self._transport)
