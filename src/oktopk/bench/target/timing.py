"""What steps of each kind take: all contenders in the same processes, in turns, for a slow minute to be everybody's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from time import monotonic
from typing import Any

from oktopk.bench.rank import RankContext
from oktopk.bench.target.schedule import WHOLE
from oktopk.bench.target.training import Job, Seen, Training

ROUNDS = 4
LEAST_CYCLES = 1  # in every round
SETTLING = 0.25  # of a turn, before what counts: buffers of a link that lay idle take the first messages at once


def time_steps(context: RankContext, jobs: Sequence[Mapping[str, Any]], dense_steps: int, seconds: float) -> None:
    """Measure what steps of each kind take and send; rank 0 emits it, contender by contender."""
    timed = [_Timed(Training(Job(**job), context, is_counted=True, brief=dense_steps)) for job in jobs]
    turns = [one for _ in range(ROUNDS) for one in timed]
    for number, one in enumerate(turns):
        if context.rank == 0:
            context.emit(done=number, of=len(turns))
        one.turn(seconds / ROUNDS)
    for one in timed:
        costs = one.end()
        if context.rank == 0:
            context.emit(costs=costs)


@dataclass
class Samples:
    """Steps that were timed, by kind."""

    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def add_all(self, steps: Iterable[Seen]) -> None:
        for seen in steps:
            self.seen.setdefault(seen.kind, []).append(seen)

    def costs(self) -> dict[str, dict[str, float]]:
        """Means, since what a whole training takes is their sum; and the extremes."""
        times = {kind: [seen.seconds for seen in steps] for kind, steps in self.seen.items()}
        return {
            "seconds": {kind: mean(one) for kind, one in times.items()},
            "fastest": {kind: min(one) for kind, one in times.items()},
            "slowest": {kind: max(one) for kind, one in times.items()},
            "bytes": {kind: mean(seen.bytes_sent for seen in steps) for kind, steps in self.seen.items()},
            "samples": {kind: float(len(one)) for kind, one in times.items()},
        }


class _Timed:
    """One contender, turn by turn."""

    def __init__(self, training: Training) -> None:
        self._training, self._samples = training, Samples()
        schedule = training.schedule
        self._dense = 0 if schedule.start == WHOLE else schedule.start
        self._pace = 0.0  # seconds of a cycle, as far as known

    def turn(self, seconds: float) -> None:
        """So many seconds of steps, or one of each kind if that takes longer; what settles does not count."""
        self._training.resume()
        is_first = self._training.done == 0
        if is_first and self._dense:
            self._training.step()  # sets things up
            self._samples.add_all(self._training.step() for _ in range(self._dense - 1))
        self._cycles(self._training.participant.settles if is_first else 1, SETTLING * seconds)
        self._samples.add_all(self._cycles(LEAST_CYCLES, seconds))

    def _cycles(self, least: int, seconds: float) -> list[Seen]:
        """Whole cycles until the time is over, by rank 0's clock, and at least so many.

        Ranks agree on a number of them at once: between two steps of a training nobody waits for others, and what is
        still under way when a step ends is the next one's to pay.
        """
        training, started, seen, done = self._training, monotonic(), [], 0
        while more := training.world.announce(self._more(least - done, seconds - (monotonic() - started))):
            begun = monotonic()
            seen += [training.step() for _ in range(more * training.schedule.cycle)]
            self._pace, done = (monotonic() - begun) / more, done + more
        return seen

    def _more(self, least: int, seconds: float) -> int:
        """How many cycles are left to do; one, as long as nobody knows what they take."""
        fitting = math.ceil(seconds / self._pace) if self._pace else 1
        return max(least, fitting, 0)

    def end(self) -> dict[str, dict[str, float]]:
        """All that was found. It ends between two exchanges, where there is something to bring together."""
        if self._training.schedule.cycle > 1:
            self._training.resume()
            self._training.step()
        final = self._training.finish()
        self._samples.add_all([final] if final is not None else [])
        self._training.close()
        return self._samples.costs()
