"""What a whole synchronisation of updates costs a rank, the network aside, against `add_`: two ranks on one core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.config import UPDATES_ALGORITHM, update_defaults
from oktopk.front_ends.local_steps import local_steps
from oktopk.transport import run_world
from oktopk.transport.base import Transport

RANKS = 2
WARMUP = 2  # rounds; the second also looks whether buffers move
PIECES = 20  # parameters that weights lie in
STEP = 0.01  # how far weights move between two synchronisations, which does not matter
SPARE = 1 << 16  # so much noise more than weights, that every round can take other noise
SELDOM = 1 << 30  # steps: only when asked

_USUAL = update_defaults()
SETTINGS = (
    ("oktopk", 0.01, "int8"),
    (UPDATES_ALGORITHM, 0.01, _USUAL.wire),
    (UPDATES_ALGORITHM, _USUAL.density, _USUAL.wire),
)


@dataclass(frozen=True)
class SynchronisationRow:
    """Processor seconds of one rank, and of an `add_` of vectors as long as the weights, by round."""

    algorithm: str
    density: float
    wire: str
    seconds: list[float]
    add_seconds: list[float]

    @property
    def ratios(self) -> list[float]:
        """Of each round."""
        return [ours / add for ours, add in zip(self.seconds, self.add_seconds, strict=True)]

    @property
    def over_add(self) -> float:
        return median(self.ratios)


def measure_synchronisations(numel: int, repeats: int) -> list[SynchronisationRow]:
    """Whole synchronisations: agree, choose, code, exchange through memory, sum, decode, move the weights."""
    return [_measure(numel, repeats, *setting) for setting in SETTINGS]


def _measure(numel: int, repeats: int, algorithm: str, density: float, wire: str) -> SynchronisationRow:
    def work(transport: Transport) -> SynchronisationRow:
        rounds = _Rounds(numel, transport)
        options: dict[str, Any] = {"algorithm": algorithm, "density": density, "wire": wire, "min_numel": 0}
        with local_steps(rounds.model, rounds.optimizer, every=SELDOM, group=transport, **options) as handle:
            timed = [rounds.take(number, handle.synchronize) for number in range(WARMUP + repeats)][WARMUP:]
        return SynchronisationRow(algorithm, density, wire, [s for s, _ in timed], [add for _, add in timed])

    return run_world(RANKS, work)[0]


class _Rounds:
    """Weights of one rank that move, are synchronised, and move again."""

    def __init__(self, numel: int, transport: Transport) -> None:
        self._numel, self._transport = numel, transport
        generator = torch.Generator().manual_seed(transport.rank)
        self._noise = torch.randn(numel + SPARE, generator=generator).mul_(STEP)
        self.model = nn.ParameterList(torch.ones(part.numel()) for part in self._parts(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self._sum = torch.zeros(numel)

    def take(self, number: int, synchronize: Callable[[], None]) -> tuple[float, float]:
        """Processor seconds of a rank for a synchronisation, and of an `add_` just before."""
        for parameter, part in zip(self.model, self._parts(number), strict=True):
            parameter.grad = part
        self.optimizer.step()
        add = _seconds(lambda: self._sum.add_(self._noise[: self._numel]), thread_time)
        self._transport.agree([])  # from here on the process works for nothing else
        return _seconds(lambda: self._together(synchronize), process_time) / RANKS, add

    def _together(self, synchronize: Callable[[], None]) -> None:
        synchronize()
        self._transport.agree([])

    def _parts(self, number: int) -> tuple[Tensor, ...]:
        start = 997 * number % SPARE
        return torch.split(self._noise[start : start + self._numel], -(-self._numel // PIECES))


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started
