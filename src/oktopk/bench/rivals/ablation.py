"""Local steps as ours are, with one thing changed: what is it that makes them work?

owed = decay * owed + what the local steps changed
sent = some of it, as `randomk` or `topka` choose and round it
shared -= mean of sent
owed -= sent
own = shared - keeps * owed: what is not kept, a rank forgets until it is sent
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from oktopk.algorithms import ALGORITHMS
from oktopk.bench.rivals.base import mean_
from oktopk.config import UPDATES_ALGORITHM, update_defaults
from oktopk.kernels.choice import choose
from oktopk.primitives.collectives import Tools
from oktopk.transport.base import Transport
from oktopk.wire import Wire

_OF_THE_LARGEST = "topka"  # all that was chosen arrives: nothing is cut globally


class Ablation:
    """With the settings it has, `oktopk.local_steps` in plain code."""

    levels = False

    def __init__(
        self,
        start: Tensor,
        shapes: Sequence[Size],
        transport: Transport,
        density: float | None = None,  # share of the entries that travels; None: that of local_steps
        keeps: float = 1,  # share of what is owed that own weights contain after a synchronisation
        decay: float = 1.0,  # of what is owed, per synchronisation
        largest: float = 0,  # 1: the largest entries travel; 0: each in its turn
    ) -> None:
        name = _OF_THE_LARGEST if largest else UPDATES_ALGORITHM
        usual = update_defaults(name)
        config, algorithm = ALGORITHMS[name]
        kernels = choose(torch.device("cpu")).kernels
        self._algorithm = algorithm(config(), Tools(transport, Wire(usual.wire), Wire(), kernels))
        self._transport, self._keeps, self._decay = transport, keeps, decay
        self._k = max(1, round((density or usual.density) * start.numel()))
        self._shared, self._owed = start.clone(), torch.zeros_like(start)

    def synchronize_(self, own: Tensor) -> None:
        # 1. What the steps since the last time changed, and what is owed from before.
        acc = self._owed * self._decay + (self._shared - own - self._keeps * self._owed)
        # 2. Some of it travels; the rest, and what rounding took, stays owed.
        reduced = self._algorithm.reduce(acc, self._k)
        self._owed = acc - reduced.sent.to_dense()
        self._shared -= reduced.mean.to_dense()
        own.copy_(self._shared - self._keeps * self._owed)

    def finish_(self, own: Tensor) -> None:
        """What own weights contain arrives."""
        mean_(own, self._transport)
