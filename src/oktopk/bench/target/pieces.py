"""What a sweep consists of: trainings, step times and measured trainings, each kept once it is finished."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from oktopk.bench.cluster import REMEDY, Cluster, emulated_cluster, missing_for_emulation
from oktopk.bench.network import Network
from oktopk.bench.planner import FRAMING
from oktopk.bench.processes import Record, run_ranks
from oktopk.bench.target.contenders import CONTENDERS, OURS, require_contenders
from oktopk.bench.target.replay import Costs, Measured, Moment, Trained
from oktopk.bench.target.schedule import FINAL, Schedule
from oktopk.bench.target.timing import ROUNDS
from oktopk.bench.target.training import EVALUATIONS, Job, said_words
from oktopk.errors import ClusterError, ConfigError
from oktopk.training.run_directory import STEPS, RunDirectory, read_json, write_json
from oktopk.training.workload import make_workload
from oktopk.transport.base import all_reduce_bytes

TRAININGS, TIMINGS, MEASURED = PARTS = ("trainings", "timings", "measured")
LONGEST = 12 * 3600.0  # seconds of one piece; a rank that dies is noticed at once
LEAST_DENSE, MOST_DENSE = 3, 12  # dense steps that are timed before others

Say = Callable[[float], None]  # hears which share of a piece is done


@dataclass(frozen=True)
class Sweep:
    """Everything that shall be known."""

    workload: str
    networks: tuple[Network, ...]
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    seeds: int = 3
    hosts: tuple[int, ...] = (2,)
    preset: str | None = None
    data: str | None = None
    epochs: int | None = None
    lr: float | None = None  # for means of gradients; local optimizers get what the trainer makes of it
    lr_warmup_epochs: float | None = None
    evaluations: int = 20
    measured: bool = False  # every training really crosses every network; else steps are timed, and it is replayed
    checked: tuple[str, ...] = (OURS,)  # whose first seed crosses every network too, to be compared with its replay
    seconds: float = 4.0  # of timing per contender and network
    runs: Path = Path("runs/target")
    parameters: int | None = None  # of the model, where that is known before anything was trained

    def __post_init__(self) -> None:
        require_contenders(self.contenders)
        for name in self.checked:
            if name not in self.contenders:
                raise ConfigError(f"{name!r} is to be checked, so it must be among the contenders.")
        timed = 0 < self.seconds < inf
        if self.seeds < 1 or self.evaluations < 1 or not timed or min(self.hosts, default=0) < 2:
            raise ConfigError(
                "seeds and evaluations must be 1 or more, seconds above 0 and hosts 2 or more, got "
                f"{self.seeds}, {self.evaluations}, {self.seconds:g} and {list(self.hosts)}."
            )
        for name in ("hosts", "networks", "contenders"):
            _require_once(name, getattr(self, name))
        for name, least in (("epochs", 1), ("lr_warmup_epochs", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise ConfigError(f"{name} must be {least} or more, got {value}.")
        if self.lr is not None and not 0 < self.lr < inf:
            raise ConfigError(f"lr must be above 0, got {self.lr}.")
        if not self.networks or any(network.bits_per_second is None for network in self.networks):
            raise ConfigError("give networks by their rates, e.g. --network 100mbit 1gbit.")

    @property
    def asked(self) -> dict[str, Any]:
        """What the quality of a training depends on besides contender, hosts and seed."""
        return {f.name: getattr(self, f.name) for f in fields(Job) if f.name not in ("contender", "hosts", "seed")}

    def job(self, contender: str, hosts: int, seed: int = 0) -> Job:
        return Job(
            self.workload, contender, hosts, seed, self.preset, self.data, self.epochs, self.lr, self.lr_warmup_epochs,
            self.evaluations,
        )  # fmt: skip


def _require_once(name: str, values: Sequence[Any]) -> None:
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise ConfigError(f"{name} must name each once, got {getattr(twice[0], 'label', twice[0])} twice.")


@dataclass(frozen=True)
class Training:
    """One training, on loopback or across a network."""

    runs: Path
    job: Job
    network: Network | None = None
    is_check: bool = False  # of a replay: of its quality only the end counts

    @property
    def part(self) -> str:
        return TRAININGS if self.network is None else MEASURED

    @property
    def name(self) -> str:
        return "-".join([*_where(self.job, self.network), f"seed{self.job.seed}", *["check"] * self.is_check])

    @property
    def path(self) -> Path:
        return self.runs / self.name

    def is_finished(self) -> bool:
        if not (self.path / "summary.json").is_file():
            return False
        return _is_of_today(self.path, RunDirectory.open(self.path).config["asked"], self.job.asked)

    def make(self, say: Say) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # what an interrupted call left: a training is minutes
        arguments = {
            "job": asdict(self.job),
            "directory": str(self.path),
            "network": self.network.label if self.network else "",
        }

        def hear(record: Record) -> None:
            say(record["done"] / record["of"])

        with _cluster(self.job.hosts, self.network) as cluster:
            run_ranks(cluster, "oktopk.bench.target.training:train", arguments, LONGEST, hear)

    def trained(self) -> Trained:
        run = RunDirectory.open(self.path)
        config, metric = run.config, run.config["metric"]
        rows = [row for row in run.rows(EVALUATIONS) if metric in row["validation"]]
        points = tuple((row["step"], row["validation"][metric]) for row in rows)
        schedule = Schedule(**config["schedule"])
        job = self.job
        return Trained(job.contender, job.hosts, job.seed, schedule, points, run.summary["diverged"])

    def crossing(self) -> Measured:
        """Quality, seconds and bytes as they were.

        A training that ends right after an exchange may need nothing to end: what a mean would have taken between two
        exchanges is then not known, nor are moments there.
        """
        run = RunDirectory.open(self.path)
        metric = run.config["metric"]
        final = [row for row in run.rows(STEPS) if row["kind"] == FINAL]
        more, sent = sum(row["seconds"] for row in final), sum(row["bytes_sent"] for row in final)
        schedule = Schedule(**run.config["schedule"])

        def moment(row: Mapping[str, Any]) -> Moment:
            seconds, nbytes = (0.0, 0) if schedule.is_level(row["step"]) else (more, sent)
            return Moment(row["step"], row["validation"][metric], row["seconds"] + seconds, row["bytes_sent"] + nbytes)

        ends_level = schedule.is_level(run.summary["steps"])
        rows = [row for row in run.rows(EVALUATIONS) if metric in row["validation"]]
        moments = tuple(moment(row) for row in rows if not ends_level or schedule.is_level(row["step"]))
        label = self.network.label if self.network else ""
        job = self.job
        return Measured(job.contender, job.hosts, label, job.seed, moments, run.summary["diverged"])


@dataclass(frozen=True)
class Timing:
    """What steps of contenders take on a network, timed together."""

    runs: Path
    jobs: tuple[Job, ...]  # alike but for the contender
    network: Network
    seconds: float  # for each
    parameters: Callable[[], int]  # known once something was trained

    part = TIMINGS

    @property
    def name(self) -> str:
        job = self.jobs[0]
        return "-".join(["steps", *_which(job), self.network.label])

    def path(self, job: Job) -> Path:
        return self.runs / f"{'-'.join(['steps', *_where(job, self.network)])}.json"

    def is_finished(self) -> bool:
        return not self._missing()

    def make(self, say: Say) -> None:
        jobs = self._missing()
        arguments = {
            "jobs": [asdict(job) for job in jobs], "dense_steps": self._dense_steps(), "seconds": self.seconds,
        }  # fmt: skip

        def hear(record: Record) -> None:
            if "done" in record:
                say(record["done"] / record["of"])

        with _cluster(jobs[0].hosts, self.network) as cluster:
            records = run_ranks(cluster, "oktopk.bench.target.timing:time_steps", arguments, LONGEST, hear)
        self.runs.mkdir(parents=True, exist_ok=True)
        found = [record["costs"] for record in records[0] if "costs" in record]
        for job, costs in zip(jobs, found, strict=True):
            write_json(self.path(job), {"asked": self._asked(job), "costs": costs})

    def costs(self) -> list[Costs]:
        """Of those who are timed already."""
        missing = self._missing()
        return [
            Costs(job.contender, job.hosts, self.network.label, **read_json(self.path(job))["costs"])
            for job in self.jobs if job not in missing
        ]  # fmt: skip

    def _missing(self) -> list[Job]:
        return [job for job in self.jobs if not self._is_known(job)]

    def _is_known(self, job: Job) -> bool:
        path = self.path(job)
        if not path.is_file():
            return False
        return _is_of_today(path, read_json(path)["asked"], self._asked(job))

    def _asked(self, job: Job) -> dict[str, Any]:
        """What step times depend on: not the seed, nor how often quality is looked at."""
        return replace(job, seed=0, evaluations=1).asked | {"seconds": self.seconds, "rounds": ROUNDS}

    def _dense_steps(self) -> int:
        """As many as fit into the time, of those that stand before others."""
        rate = (self.network.bits_per_second or 1e12) * FRAMING / 8
        each = all_reduce_bytes(4 * self.parameters(), self.jobs[0].hosts) / rate
        return max(LEAST_DENSE, min(MOST_DENSE, int(self.seconds / each)))


Piece = Training | Timing


def pieces(sweep: Sweep, parts: Sequence[str] = PARTS) -> list[Piece]:
    """In the order in which they are made: seed after seed, then network after network."""
    return [piece for piece in _all(sweep) if piece.part in parts]


def _all(sweep: Sweep) -> Iterator[Piece]:
    trainings = [
        Training(sweep.runs, sweep.job(contender, hosts, seed))
        for seed in range(sweep.seeds)
        for hosts in sweep.hosts
        for contender in sweep.contenders
    ]
    if sweep.measured:
        yield from (replace(one, network=network) for one in trainings for network in sweep.networks)
        return
    yield from trainings
    for network in sweep.networks:
        for hosts in sweep.hosts:
            jobs = tuple(replace(sweep.job(contender, hosts), evaluations=1) for contender in sweep.contenders)
            yield Timing(sweep.runs, jobs, network, sweep.seconds, lambda: parameters(sweep))
            for contender in sweep.checked:
                yield Training(sweep.runs, replace(sweep.job(contender, hosts), evaluations=1), network, is_check=True)


def parameters(sweep: Sweep) -> int:
    """Of the model, as a training of the sweep has written it down."""
    if sweep.parameters is not None:
        return sweep.parameters
    for piece in pieces(sweep):
        if isinstance(piece, Training) and (piece.path / "config.json").is_file():
            return int(RunDirectory.open(piece.path).config["parameters"])
    raise ConfigError(f"nothing was trained in {sweep.runs} yet: make the trainings first.")


def require_workloads(wanted: Sequence[Piece]) -> None:
    """Refuse before anything starts a preset, data or a number of hosts that no rank could train with."""
    jobs = {piece.job.hosts: piece.job for piece in wanted if isinstance(piece, Training)}
    jobs |= {piece.jobs[0].hosts: piece.jobs[0] for piece in wanted if isinstance(piece, Timing)}
    for hosts, job in jobs.items():
        make_workload(job.config).steps_per_epoch(hosts)


def require_emulation(wanted: Sequence[Piece]) -> None:
    """Refuse before anything starts what would fail hours later."""
    missing = missing_for_emulation()
    if missing is not None and any(piece.part != TRAININGS and not piece.is_finished() for piece in wanted):
        raise ClusterError(f"cannot emulate a network: {missing}. {REMEDY} Trainings alone: --parts trainings.")


@contextmanager
def _cluster(hosts: int, network: Network | None) -> Iterator[Cluster]:
    if network is None:
        yield Cluster(hosts)
        return
    with emulated_cluster(hosts, network) as cluster:
        yield cluster


def _where(job: Job, network: Network | None) -> list[str]:
    across = [network.label] if network else []
    return [*_which(job), re.sub(r"[^a-z0-9.]+", "-", job.contender), *across]


def _which(job: Job) -> list[str]:
    """What contenders of a race have in common."""
    preset = [job.preset] if job.preset else []
    return [job.workload, *preset, *said_words(asdict(job)), f"{job.hosts}hosts"]


def _is_of_today(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether a piece was made as it would be made today; of another sweep, it is refused."""
    unlike = [name for name in asked if name != "method" and found.get(name) != asked[name]]
    if unlike:
        told = ", ".join(f"{name} {found.get(name)!r} and not {asked[name]!r}" for name in unlike)
        raise ConfigError(f"{path} was made with {told}: give another --runs, or delete it.")
    return bool(found.get("method") == asked["method"])
