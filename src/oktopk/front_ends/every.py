"""How many optimizer steps lie between two synchronisations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, Protocol

from oktopk.config import require_positive
from oktopk.errors import ConfigError
from oktopk.reducer import Reducer

log = logging.getLogger("oktopk")

Every = int | Callable[[int], int] | Literal["auto"]

SHARE = 0.1  # of a step that synchronising may take
MOST = 64  # steps
SAMPLES = 5  # synchronisations that are timed, after one that warms up
LOOK_AGAIN = 100  # synchronisations after which they are timed again


class Interval(Protocol):
    def steps(self, step: int) -> int:
        """How many steps after `step` the next synchronisation comes."""
        ...

    def observe(self, synchronising: float, computing: float, travelling: float = 0.0) -> None:
        """Learn how many seconds a synchronisation took, a step without it, and a reduction beside training."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def interval(every: Every, reducer: Reducer) -> Interval:
    if every == "auto":
        return Measured(reducer)
    if isinstance(every, bool) or not (isinstance(every, int) or callable(every)):
        raise ConfigError(f"every must be a number of steps, a function of the step, or 'auto', got {every!r}.")
    return Given(every)


@dataclass
class Given:
    """As the user says: a number, or a function of the step."""

    every: int | Callable[[int], int]

    def __post_init__(self) -> None:
        if not callable(self.every):
            require_positive("every", self.every)

    def steps(self, step: int) -> int:
        if not callable(self.every):
            return self.every
        steps = self.every(step)
        require_positive(f"every({step})", steps)
        return steps

    def observe(self, synchronising: float, computing: float, travelling: float = 0.0) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A function is the user's to restore."""


@dataclass
class Measured:
    """So many steps that synchronising takes a tenth of the time, on the slowest rank; agreed between ranks.

    And so many that a reduction which travels beside training has arrived when it is applied.
    """

    reducer: Reducer
    now: int = 1
    synchronisations: int = 0
    _seconds: list[tuple[float, float, float]] = field(default_factory=list)

    def steps(self, step: int) -> int:
        return self.now

    def observe(self, synchronising: float, computing: float, travelling: float = 0.0) -> None:
        self.synchronisations += 1
        if not self._is_timing:
            return
        self._seconds.append((synchronising, computing, travelling))
        if len(self._seconds) > SAMPLES:
            self._decide()

    @property
    def _is_timing(self) -> bool:
        """Whether the last synchronisation is one of those that are timed: at first, and now and then."""
        return (self.synchronisations - 1) % LOOK_AGAIN <= SAMPLES

    def _decide(self) -> None:
        timed, self._seconds = self._seconds[1:], []
        mine = [round(1e9 * median(column)) for column in zip(*timed, strict=True)]
        rows = self.reducer.communicate(lambda transport: transport.agree(mine))
        synchronising, travelling = (max(row[index] for row in rows) / 1e9 for index in (0, 2))
        computing = max(1, min(row[1] for row in rows)) / 1e9
        self.now = min(MOST, max(1, math.ceil(max(synchronising / SHARE, travelling) / computing)))
        if self.reducer.rank == 0:
            log.info(
                "every=%d: synchronising takes %.1f ms, a reduction beside training %.1f ms and a step %.1f ms.",
                self.now, synchronising * 1e3, travelling * 1e3, computing * 1e3,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, "synchronisations": self.synchronisations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now, self.synchronisations, self._seconds = int(state["now"]), int(state["synchronisations"]), []
        if self.synchronisations and self._is_timing:  # its times are gone, and this may be another machine
            self.synchronisations -= (self.synchronisations - 1) % LOOK_AGAIN + 1
