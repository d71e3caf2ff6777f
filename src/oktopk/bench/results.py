"""Does it learn as well? Every workload under every contender with several seeds, from run directories to one table.

A contender is an algorithm that reduces gradients, or `updates`: every rank steps by itself, and updates are reduced.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.bench.host import describe_machine
from oktopk.training.run_directory import RunDirectory

BEGIN, END = "<!-- workload results: begin -->", "<!-- workload results: end -->"
BASELINE, UPDATES = "dense", "updates"
# What the trainer is told of each contender; everything else is its preset's.
CONTENDERS: dict[str, dict[str, Any]] = {name: {"algorithm": name, "reduce": "gradients"} for name in ALGORITHMS}
CONTENDERS[UPDATES] = {"algorithm": "randomk", "reduce": "updates"}


@dataclass(frozen=True)
class Trial:
    """One training that the table needs."""

    workload: str
    contender: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.contender}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What one finished training came to."""

    trial: Trial
    metric: str
    lower_is_better: bool
    value: float
    bytes_sent: int
    dense_bytes: int
    seconds: float  # of all steps, as if each took what the median does
    data_share: float  # of a step spent waiting for data
    density: float
    label: str  # of its row


@dataclass(frozen=True)
class Row:
    """One contender on one workload, over its seeds."""

    workload: str
    contender: str
    label: str
    metric: str
    values: tuple[float, ...]
    bytes_sent: float
    of_dense: float
    seconds: float
    data_share: float
    density: float
    as_good_as_dense: bool | None  # within 2 standard deviations or 1%, or better; None: no dense runs to compare with

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def trials(workloads: Sequence[str], contenders: Sequence[str], seeds: Sequence[int]) -> list[Trial]:
    """Seed by seed, so that a table with fewer seeds is complete early."""
    return [Trial(w, c, s) for s, w, c in product(seeds, workloads, contenders)]


def read_outcome(runs: Path, trial: Trial) -> Outcome | None:
    """The numbers of a run that ran to its end; None if it did not."""
    path = runs / trial.name
    if not (path / "config.json").is_file():
        return None
    run = RunDirectory.open(path)
    summary, config = run.summary, run.config
    if not summary or summary.get("stopped_by") or summary["metric"] not in summary.get("validation", {}):
        return None
    steps = run.rows("steps.jsonl")
    step = statistics.median([b["wall_seconds"] - a["wall_seconds"] for a, b in pairwise(steps)] or [0.0])
    data = statistics.median([row["seconds"]["data"] for row in steps] or [0.0])
    return Outcome(
        trial,
        summary["metric"],
        config["lower_is_better"],
        summary["validation"][summary["metric"]],
        summary["bytes_sent"],
        summary["dense_bytes"],
        len(steps) * step,
        data / step if step else 0.0,
        1.0 if trial.contender == BASELINE else config["density"],
        _label(trial.contender, config),
    )


def _label(contender: str, config: Mapping[str, Any]) -> str:
    if contender != UPDATES:
        return contender
    return "updates: {algorithm}, density {density:g}, {wire}".format(**config)


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row per workload and contender, in the order they come."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.trial.workload, outcome.trial.contender), []).append(outcome)
    order = list(dict.fromkeys(workload for workload, _ in groups))
    return [
        _row(group, groups.get((workload, BASELINE)))
        for workload in order
        for (of, _), group in groups.items()
        if of == workload
    ]


def _row(group: Sequence[Outcome], dense: Sequence[Outcome] | None) -> Row:
    first = group[0]
    return Row(
        first.trial.workload,
        first.trial.contender,
        first.label,
        first.metric,
        tuple(outcome.value for outcome in group),
        statistics.mean(outcome.bytes_sent for outcome in group),
        sum(outcome.bytes_sent for outcome in group) / max(1, sum(outcome.dense_bytes for outcome in group)),
        statistics.mean(outcome.seconds for outcome in group),
        max(outcome.data_share for outcome in group),
        first.density,
        _as_good(group, dense) if dense and group is not dense else None,
    )


def _as_good(group: Sequence[Outcome], dense: Sequence[Outcome]) -> bool:
    values = [outcome.value for outcome in dense]
    mean = statistics.mean(values)
    slack = max(2 * statistics.stdev(values) if len(values) > 1 else 0.0, 0.01 * abs(mean))
    loss = statistics.mean(outcome.value for outcome in group) - mean
    return loss <= slack if dense[0].lower_is_better else -loss <= slack


def section(table: Sequence[Row], command: str, workers: int) -> str:
    """The part of docs/results.md that is generated."""
    lines = [
        BEGIN,
        f"`{command}`, {workers} workers, {_machine()}. Mean and standard deviation over the seeds; *sent* is",
        "what one worker sends in the whole training, dense warm-up and the last mean of updates included, and *fewer*",
        "how often that goes into what dense sends; *as good* means within two standard deviations of dense, within 1%",
        "of it, or better. *Time* is the median step times the number of steps, of workers on one shared machine",
        "without a network: it says what selection costs, not what it gains. *Data* is the share of a step spent",
        "waiting for the next batch, in the worst of the seeds. All rows reduce gradients but the one that says",
        "*updates* ([local steps](updates.md)).",
        "",
    ]
    for workload in dict.fromkeys(row.workload for row in table):
        lines += _table([row for row in table if row.workload == workload])
    return "\n".join([*lines, END]) + "\n"


def _table(part: Sequence[Row]) -> list[str]:
    first = part[0]
    density = max((row.density for row in part if row.density < 1.0 and row.contender != UPDATES), default=1.0)
    lines = [
        f"### {first.workload}, preset small, density of gradients {density:g}",
        "",
        f"| what is reduced | {first.metric} | seeds | as good | sent | fewer | time | data |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.label} | {_spread(row)} | {len(row.values)} | {_word(row.as_good_as_dense)} "
        f"| {row.bytes_sent / 1e6:.1f} MB | {1 / row.of_dense:.3g}x | {row.seconds:.0f} s | {row.data_share:.1%} |"
        for row in part
    ]
    return [*lines, ""]


def _spread(row: Row) -> str:
    """One seed has no spread, which is not a spread of zero."""
    return f"{row.mean:.4g} ± {row.deviation:.2g}" if len(row.values) > 1 else f"{row.mean:.4g}"


def _word(verdict: bool | None) -> str:
    return "" if verdict is None else ("yes" if verdict else "no")


def _machine() -> str:
    machine = describe_machine()
    return "{cores} cores ({processor}), Python {python}, torch {torch}".format(**machine)


def write_section(path: Path, text: str) -> None:
    """Put the section into the page: in the place of the former one, or at the end; a missing page is begun."""
    page = path.read_text(encoding="utf-8") if path.exists() else "# Results\n\n"
    before, found, rest = page.partition(BEGIN)
    if found:
        page = before + text + rest.partition(END)[2].lstrip("\n")
    else:
        page = f"{page.rstrip()}\n\n{text}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def to_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    return [vars(row) | {"mean": row.mean, "deviation": row.deviation} for row in table]
