"""SPARTA between the outer steps of DiLoCo (Exo Labs, 2025): ranks drift less, so outer steps may be rarer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Size, Tensor

from oktopk.bench.rivals.diloco import DiLoCo
from oktopk.bench.rivals.sparta import Sparta
from oktopk.transport.base import Transport


class SpartaDiLoCo:
    """A random share of the weights every time, and an outer step every so many times."""

    levels = False  # every outer step does

    def __init__(
        self,
        start: Tensor,
        shapes: Sequence[Size],
        transport: Transport,
        share: float = 0.005,  # of the weights, drawn afresh every time
        every: int = 100,  # synchronisations from one outer step to the next (published: 100 to 10,000)
        rate: float = 0.7,  # of the outer step
        momentum: float = 0.9,  # of the outer step
        seed: int = 0,
    ) -> None:
        self._sparta = Sparta(start, shapes, transport, share, seed)
        self._diloco = DiLoCo(start, shapes, transport, rate, momentum)
        self._every, self._done = int(every), 0

    def synchronize_(self, own: Tensor) -> None:
        self._done += 1
        self._sparta.synchronize_(own)
        if self._done % self._every == 0:
            self._diloco.synchronize_(own)

    def finish_(self, own: Tensor) -> None:
        self._diloco.finish_(own)
