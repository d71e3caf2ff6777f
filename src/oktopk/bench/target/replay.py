"""From steps to time: what a training takes on a network, when it has reached a target, and who was first.

A training has steps of a few kinds, in an order that its schedule gives; a network gives what a step of each kind takes
and sends. Everything here is arithmetic on records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from oktopk.bench.target.schedule import FINAL, Schedule
from oktopk.errors import ConfigError

SLACK = 0.01  # of what dense reaches at its end


@dataclass(frozen=True)
class Trained:
    """One whole training: its quality on the way."""

    contender: str
    hosts: int
    seed: int
    schedule: Schedule
    points: tuple[tuple[int, float], ...]  # after so many steps, the quality
    diverged: bool = False

    @property
    def steps(self) -> int:
        return self.points[-1][0]

    @property
    def final(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True)
class Costs:
    """What steps of a contender take on a network, by kind."""

    contender: str
    hosts: int
    network: str
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]  # sent by one host
    fastest: Mapping[str, float]
    slowest: Mapping[str, float]
    samples: Mapping[str, float]


@dataclass(frozen=True)
class Moment:
    """A training that would end here: how good, how late, at which cost."""

    step: int
    quality: float
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Measured:
    """One whole training that really crossed the network."""

    contender: str
    hosts: int
    network: str
    seed: int
    moments: tuple[Moment, ...]
    diverged: bool = False


@dataclass(frozen=True)
class Goal:
    """The quality to reach."""

    value: float
    lower_is_better: bool

    def is_reached(self, quality: float) -> bool:
        return quality <= self.value if self.lower_is_better else quality >= self.value


def spent(schedule: Schedule, steps: int, each: Mapping[str, float]) -> float:
    """What so many steps cost, with what ends a training there."""
    counts = schedule.counts(steps)
    missing = sorted(counts.keys() - each.keys())
    if missing:
        raise ConfigError(f"no {', '.join(missing)} step was timed: delete the timing, and call again.")
    ending = 0.0 if schedule.is_level(steps) else each.get(FINAL, 0.0)
    return sum(count * each[kind] for kind, count in counts.items()) + ending


def replay(trained: Trained, costs: Costs) -> tuple[Moment, ...]:
    """The training, as if it had crossed the network."""
    schedule = trained.schedule
    return tuple(
        Moment(step, quality, spent(schedule, step, costs.seconds), spent(schedule, step, costs.bytes))
        for step, quality in trained.points
    )


def goal_of(value: float | None, finals: Sequence[float], lower_is_better: bool) -> Goal:
    """The value, or what dense reaches at the end (the mean over these seeds) within 1%."""
    if value is not None:
        return Goal(value, lower_is_better)
    if not finals:
        raise ConfigError("the target is what dense reaches, so 'ddp dense' must take part: or give --target VALUE.")
    reached = mean(finals)
    return Goal(reached + (SLACK if lower_is_better else -SLACK) * abs(reached), lower_is_better)


def first_reached(moments: Sequence[Moment], goal: Goal) -> Moment | None:
    """The first evaluation that reaches the goal, be it lost again later."""
    return next((moment for moment in moments if goal.is_reached(moment.quality)), None)


@dataclass(frozen=True)
class Standing:
    """One contender on one network, over its seeds."""

    contender: str
    seeds: int
    reached: tuple[Moment, ...]  # of the seeds that did
    ends: tuple[Moment, ...]  # of all seeds
    diverged: int = 0  # seeds whose quality stopped being a number

    @property
    def has_reached(self) -> bool:
        return len(self.reached) == self.seeds

    @property
    def seconds(self) -> float:
        """Until the target, where all seeds reached it."""
        return mean(moment.seconds for moment in self.reached)

    @property
    def quality(self) -> float:
        return mean(moment.quality for moment in self.ends)


def standing(contender: str, runs: Sequence[Sequence[Moment]], goals: Sequence[Goal], diverged: int = 0) -> Standing:
    """Of its trainings, each with the goal of its seed."""
    pairs = zip(runs, goals, strict=True)
    reached = [moment for run, goal in pairs if (moment := first_reached(run, goal)) is not None]
    return Standing(contender, len(runs), tuple(reached), tuple(run[-1] for run in runs), diverged)


def deviation(measured: Measured, replayed: Sequence[Moment]) -> float:
    """How much longer the replay of a training takes than the training took."""
    return replayed[-1].seconds / measured.moments[-1].seconds - 1.0


def pareto_front(points: Sequence[tuple[float, float]], lower_is_better: bool) -> list[tuple[float, float]]:
    """Of (bytes, quality) those that nobody beats in both, by bytes."""
    front: list[tuple[float, float]] = []
    for nbytes, quality in sorted(points, key=lambda point: (point[0], point[1] if lower_is_better else -point[1])):
        if not front or (quality < front[-1][1] if lower_is_better else quality > front[-1][1]):
            front.append((nbytes, quality))
    return front
