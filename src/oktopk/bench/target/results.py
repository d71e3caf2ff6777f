"""What a sweep found, in one file: the page is made of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from oktopk.bench.host import describe_machine
from oktopk.bench.target.contenders import CONTENDERS, DENSE_NAME
from oktopk.bench.target.pieces import MEASURED, PARTS, TIMINGS, TRAININGS, Piece, Sweep, Timing, Training, pieces
from oktopk.bench.target.replay import (
    Costs,
    Goal,
    Measured,
    Moment,
    Standing,
    Trained,
    deviation,
    goal_of,
    replay,
    standing,
)
from oktopk.bench.target.schedule import Schedule
from oktopk.bench.target.training import said_words
from oktopk.errors import DataError
from oktopk.training.run_directory import RunDirectory, read_json, write_json

T = TypeVar("T")


@dataclass(frozen=True)
class Results:
    """All that tables and figures need."""

    command: str
    asked: Mapping[str, Any]  # what all trainings have in common
    seconds: float  # of timing per contender and network
    machines: Mapping[str, Mapping[str, Any]]  # by table: contenders in one are timed on the same
    workload: str
    preset: str
    parameters: int
    metric: str
    lower_is_better: bool
    target: float | None  # None: what dense reaches
    seeds: int  # that were asked for
    networks: Mapping[str, float]  # label: bits per second
    trained: tuple[Trained, ...]
    costs: tuple[Costs, ...]
    measured: tuple[Measured, ...]  # whole trainings across the network
    is_measured: bool  # they are what counts; else they are there to compare a replay with
    methods: Mapping[str, str] = field(default_factory=dict)  # how each contender was trained, by contender and hosts

    @property
    def name(self) -> str:
        """Of its file and its figures."""
        return result_name(self.preset, self.asked)

    @property
    def hosts(self) -> list[int]:
        return sorted({hosts for _, hosts, _ in self._ran()})

    def contenders(self, hosts: int) -> list[str]:
        return list(dict.fromkeys(name for name, there, _ in self._ran() if there == hosts))

    @property
    def names(self) -> set[str]:
        """Of contenders with their hosts, as in `methods`."""
        return {_method_name(name, hosts) for name, hosts, _ in self._ran()}

    def _ran(self) -> list[tuple[str, int, int]]:
        return [_who(one) for one in self.trained] + [_who(one) for one in self.measured]

    def seeds_of(self, contender: str, hosts: int) -> int:
        return len({seed for name, there, seed in self._ran() if (name, there) == (contender, hosts)})

    def rest_of(self, piece: Piece) -> Piece | None:
        """What of a piece of a sweep is not known yet."""
        if isinstance(piece, Timing):
            label = piece.network.label
            jobs = tuple(job for job in piece.jobs if not self.costs_of(job.contender, job.hosts, label))
            return replace(piece, jobs=jobs) if jobs else None
        return None if self._has(piece) else piece

    def _has(self, piece: Training) -> bool:
        who = (piece.job.contender, piece.job.hosts, piece.job.seed)
        if piece.network is None:
            return who in map(_who, self.trained)
        return any((_who(one), one.network) == (who, piece.network.label) for one in self.measured)

    def goal(self, hosts: int, seed: int | None = None) -> Goal:
        """Of trainings with a seed: what dense reaches with the same one; None, or dense has none: the mean over seeds.

        Seeds differ by more than contenders do: they are other first weights and another order of the data.
        """
        runs = self.measured if self.is_measured else ()
        finals = {one.seed: one.final for one in self.trained if (one.contender, one.hosts) == (DENSE_NAME, hosts)}
        finals |= {
            one.seed: one.moments[-1].quality for one in runs if (one.contender, one.hosts) == (DENSE_NAME, hosts)
        }
        return goal_of(self.target, [finals[seed]] if seed in finals else list(finals.values()), self.lower_is_better)

    def runs(self, contender: str, hosts: int, network: str) -> dict[int, tuple[Moment, ...]]:
        """By seed, on a network: as it was measured, or replayed; none while steps are not timed yet."""
        if self.is_measured:
            wanted = (contender, hosts, network)
            return {one.seed: one.moments for one in self.measured if (*_who(one)[:2], one.network) == wanted}
        costs = self.costs_of(contender, hosts, network)
        mine = [one for one in self.trained if (one.contender, one.hosts) == (contender, hosts)]
        return {one.seed: replay(one, costs) for one in mine} if costs else {}

    def standings(self, hosts: int, network: str) -> list[Standing]:
        """The contenders that are known, the first to reach the target first."""
        found = [
            standing(name, list(runs.values()), [self.goal(hosts, seed) for seed in runs], self._diverged(name, hosts))
            for name in self.contenders(hosts)
            if (runs := self.runs(name, hosts, network))
        ]
        sign = 1 if self.lower_is_better else -1
        return sorted(found, key=lambda s: (not s.has_reached, s.seconds if s.has_reached else sign * s.quality))

    def without(self, tables: Collection[str]) -> Results:
        """The same, with nothing timed or measured for these."""

        def stays(one: Costs | Measured) -> bool:
            return table_name(one.hosts, one.network) not in tables

        return replace(
            self, costs=tuple(filter(stays, self.costs)), measured=tuple(filter(stays, self.measured)),
            machines={name: machine for name, machine in self.machines.items() if name not in tables},
        )  # fmt: skip

    def without_contenders(self, names: Collection[str]) -> Results:
        """The same, with nothing of these, named as in `methods`."""

        def stays(one: Trained | Costs | Measured) -> bool:
            return _method_name(one.contender, one.hosts) not in names

        return replace(
            self, trained=tuple(filter(stays, self.trained)), costs=tuple(filter(stays, self.costs)),
            measured=tuple(filter(stays, self.measured)),
            methods={name: method for name, method in self.methods.items() if name not in names},
        )  # fmt: skip

    def costs_of(self, contender: str, hosts: int, network: str) -> Costs | None:
        wanted = (contender, hosts, network)
        return next((one for one in self.costs if (one.contender, one.hosts, one.network) == wanted), None)

    def checks(self) -> list[tuple[Measured, tuple[Moment, ...], float]]:
        """Measured trainings, their replays, and how far these are off."""
        if self.is_measured:
            return []
        found = []
        for one in self.measured:
            costs = self.costs_of(one.contender, one.hosts, one.network)
            twin = next((t for t in self.trained if _who(t) == _who(one)), None)
            if costs and twin:
                replayed = replay(twin, costs)
                found.append((one, replayed, deviation(one, replayed)))
        return found

    def _diverged(self, contender: str, hosts: int) -> int:
        runs: Sequence[Trained | Measured] = self.measured if self.is_measured else self.trained
        return len({one.seed for one in runs if one.diverged and (one.contender, one.hosts) == (contender, hosts)})


def table_name(hosts: int, network: str) -> str:
    """Who is compared with whom."""
    return f"{hosts} hosts at {network}"


def result_name(preset: str, asked: Mapping[str, Any]) -> str:
    """One for every recipe, so that sweeps of several stand side by side."""
    return "-".join(["target", asked["workload"], preset, *said_words(asked)])


def known_results(path: Path, sweep: Sweep, parts: Collection[str] = PARTS) -> Results | None:
    """What of an earlier sweep in that file counts for this one, of which these parts are going to be made.

    Who is trained in another way today goes only if this sweep trains it again.
    Times of a table that others are to join only if this is the machine that took them: contenders are compared.
    """
    if not path.is_file():
        return None
    found = read_target(path)
    if found.asked != sweep.asked or found.is_measured != sweep.measured:
        return None
    if (MEASURED if sweep.measured else TRAININGS) in parts:
        found = found.without_contenders([name for name in outdated(found, sweep) if name in _made_by(sweep)])
    if sweep.measured:
        return found
    if found.seconds != sweep.seconds:
        return replace(found, costs=(), measured=(), machines={})
    return found.without(_timed_elsewhere(found, sweep)) if TIMINGS in parts else found


def outdated(found: Results, sweep: Sweep) -> list[str]:
    """Who is trained in another way today than when this was found, or in a way that was not written down then."""
    ran = [(name, hosts) for hosts in found.hosts for name in found.contenders(hosts) if name in CONTENDERS]
    today = {_method_name(*who): sweep.job(*who).method for who in ran}
    return [name for name, method in today.items() if found.methods.get(name) != method]


def _made_by(sweep: Sweep) -> set[str]:
    return {_method_name(contender, hosts) for contender in sweep.contenders for hosts in sweep.hosts}


def _method_name(contender: str, hosts: int) -> str:
    return f"{contender}, {hosts} hosts"


def _timed_elsewhere(found: Results, sweep: Sweep) -> set[str]:
    """Tables that others are to join, and that another machine has timed."""
    unfinished = {
        table_name(piece.jobs[0].hosts, piece.network.label)
        for piece in pieces(sweep, [TIMINGS]) if isinstance(piece, Timing) and found.rest_of(piece)
    }  # fmt: skip
    here = describe_machine()
    return {name for name in unfinished & found.machines.keys() if found.machines[name] != here}


def collect(sweep: Sweep, target: float | None, command: str, known: Results | None = None) -> Results:
    """What is finished of a sweep, with what was known before."""
    wanted = pieces(sweep)
    trainings = [piece for piece in wanted if isinstance(piece, Training) and piece.is_finished()]
    if trainings:
        about = RunDirectory.open(trainings[0].path).config
    elif known is not None:
        about = asdict(known)
    else:
        raise DataError(f"no training of {sweep.workload} has ended in {sweep.runs} yet.")
    made = Results(
        command, sweep.asked, sweep.seconds, {}, sweep.workload, about["preset"], about["parameters"],
        about["metric"], about["lower_is_better"], target, sweep.seeds,
        {one.label: one.bits_per_second or 0.0 for one in sweep.networks},
        tuple(piece.trained() for piece in trainings if piece.network is None),
        tuple(costs for piece in wanted if isinstance(piece, Timing) for costs in piece.costs()),
        tuple(piece.crossing() for piece in trainings if piece.network is not None), sweep.measured,
        {_method_name(piece.job.contender, piece.job.hosts): piece.job.method for piece in trainings},
    )  # fmt: skip
    tables = {table_name(one.hosts, one.network) for one in made.costs}
    tables |= {table_name(one.hosts, one.network) for one in made.measured}
    made = replace(made, machines={name: describe_machine() for name in sorted(tables)})
    return made if known is None else _joined(known, made)


def _joined(known: Results, made: Results) -> Results:
    """The new results, with those of before that were not made again."""
    return replace(
        made,
        machines={**known.machines, **made.machines},
        seeds=max(known.seeds, made.seeds),
        networks=dict(sorted({**known.networks, **made.networks}.items(), key=lambda item: item[1])),
        trained=_union(known.trained, made.trained, _who),
        costs=_union(known.costs, made.costs, lambda one: (one.contender, one.hosts, one.network)),
        measured=_union(known.measured, made.measured, lambda one: (_who(one), one.network)),
        methods={**known.methods, **made.methods},
    )


def _union(before: Sequence[T], after: Sequence[T], key: Callable[[T], Hashable]) -> tuple[T, ...]:
    return tuple(({key(one): one for one in before} | {key(one): one for one in after}).values())


def write_target(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(results))


def read_target(path: Path) -> Results:
    """What `write_target` wrote."""
    try:
        values = dict(read_json(path))
        parts = {
            "trained": tuple(
                Trained(**{**one, "schedule": Schedule(**one["schedule"]), "points": tuple(map(tuple, one["points"]))})
                for one in values["trained"]
            ),
            "costs": tuple(Costs(**one) for one in values["costs"]),
            "measured": tuple(
                Measured(**{**one, "moments": tuple(Moment(**moment) for moment in one["moments"])})
                for one in values["measured"]
            ),
        }
        return Results(**values | parts)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not a result of `oktopk bench target` ({error}): write it again.") from error


def _who(one: Trained | Measured) -> tuple[str, int, int]:
    return one.contender, one.hosts, one.seed
