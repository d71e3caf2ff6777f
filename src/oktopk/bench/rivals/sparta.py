"""SPARTA (Exo Labs, 2025): a random share of the weights is replaced by its mean over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from oktopk.bench.rivals.base import mean_
from oktopk.transport.base import Transport


class Sparta:
    """Nothing but the drawn weights travels, as float32; all ranks draw alike, so no index does."""

    levels = False

    def __init__(
        self,
        start: Tensor,
        shapes: Sequence[Size],
        transport: Transport,
        share: float = 0.005,  # of the weights, drawn afresh every time (published: 0.0005 to 0.005)
        seed: int = 0,
    ) -> None:
        self._transport, self._share = transport, share
        self._draws = torch.Generator().manual_seed(seed)

    def synchronize_(self, own: Tensor) -> None:
        drawn = torch.rand(own.shape, generator=self._draws) < self._share
        own[drawn] = mean_(own[drawn], self._transport)

    def finish_(self, own: Tensor) -> None:
        mean_(own, self._transport)
