"""`oktopk compare`: the same seed and data under several algorithms or settings, one table, one report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from oktopk.cli.arguments import take_file
from oktopk.cli.console import bytes_text, console, duration_text, table
from oktopk.cli.report import Report
from oktopk.cli.train import Train, parse_train
from oktopk.errors import ConfigError, nearest
from oktopk.training.algorithms import find_config
from oktopk.training.config import TrainConfig
from oktopk.training.environment import world_rank
from oktopk.training.run_directory import RunDirectory
from oktopk.training.values import as_fields

_BASELINE = "dense"


@dataclass(frozen=True)
class Compare(Train):
    """Train one workload under several algorithms: one table, one report.

    Takes every option of `oktopk train`. Options of an algorithm (such as --threshold) apply to the one named by
    --algorithm. --sweep tries several values of any option, e.g. --sweep density=0.02,0.05 lr=0.001,0.004.

    Example:
        oktopk compare speech --algorithms dense,oktopk --workers 2 --epochs 1 --max-steps 4 --name trial
    """

    algorithms: str = "dense,topka,gtopk,oktopk"  # separated by commas; dense (else the first) is the baseline
    sweep: tuple[str, ...] = ()  # NAME=VALUE,VALUE,... of an option; several make a grid
    report: bool = True  # write the report when all are done

    @classmethod
    def parse(cls, args: Sequence[str], prog: str) -> Compare:
        file, rest = take_file(args)
        command: Compare = parse_train(cls, file, rest, prog)
        return command

    def __call__(self) -> int:
        variants = self.variants()
        for variant in variants:
            console().print(f"== {variant.name}", markup=False) if world_rank() == 0 and not self.dry_run else None
            code = variant()
            if code or self._was_stopped(variant):
                return code
        return 0 if self.dry_run or world_rank() != 0 else self._conclude([v.runs / str(v.name) for v in variants])

    def _was_stopped(self, variant: Train) -> bool:
        """Whether a signal ended it, which is meant for all that were to follow, too."""
        if self.dry_run:
            return False
        stopped_by = str(RunDirectory(variant.runs / str(variant.name)).summary.get("stopped_by", ""))
        return stopped_by.startswith("SIG")

    def variants(self) -> list[Train]:
        """One training per algorithm and point of the grid, in runs that share a name."""
        base = {f.name: getattr(self, f.name) for f in fields(Train)}
        name = self.name or f"compare-{self.workload.split(':')[-1]}-{datetime.now():%Y%m%d-%H%M%S}"
        return [
            _variant(base, algorithm, point, name)
            for algorithm in self._algorithms()
            for point in _grid([_axis(text) for text in self.sweep])
        ]

    def _algorithms(self) -> list[str]:
        names = [name.strip() for name in self.algorithms.split(",") if name.strip()]
        for name in names:
            find_config(name)
        return names

    def _conclude(self, runs: Sequence[Path]) -> int:
        console().print(table("comparison", comparison_rows(runs)))
        if not self.report:
            return 0
        return int(Report(run=tuple(str(run) for run in runs))())


def comparison_rows(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Final loss, metric, bytes, time and speed-up of each run."""
    summaries = [RunDirectory.open(run).summary for run in runs]
    algorithms = [RunDirectory.open(run).config["algorithm"] for run in runs]
    baseline = summaries[algorithms.index(_BASELINE) if _BASELINE in algorithms else 0]
    return [_row(run, summary, baseline) for run, summary in zip(runs, summaries, strict=True)]


def _row(run: Path, summary: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run.name, "steps": summary["steps"]}
    if "train_loss" in summary:
        row["train loss"] = summary["train_loss"]
    metric = summary["metric"]
    if metric in summary.get("validation", {}):
        row[metric] = summary["validation"][metric]
    row["sent"] = bytes_text(summary["bytes_sent"])
    row["of dense"] = f"{summary['bytes_sent'] / summary['dense_bytes']:.1%}" if summary["dense_bytes"] else "-"
    if "gpu_peak_bytes" in summary:
        row["GPU peak"] = bytes_text(summary["gpu_peak_bytes"])
    row["time"] = duration_text(summary["wall_seconds"])
    if summary["wall_seconds"]:
        row["speed-up"] = f"{baseline['wall_seconds'] / summary['wall_seconds']:.2f}"
    return row


def _variant(base: Mapping[str, Any], algorithm: str, point: Mapping[str, str], name: str) -> Train:
    label = "-".join([name, algorithm, *(f"{option}{value}" for option, value in point.items())])
    options = base["algorithm_options"] if algorithm == base["algorithm"] else {}
    changed = {**base, "algorithm": algorithm, "algorithm_options": options, "name": label}
    return Train(**{**changed, **{option: _typed(option, value) for option, value in point.items()}})


def _axis(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    known = {f.name for f in fields(TrainConfig)}
    name = name.strip().replace("-", "_")
    if not equals or name not in known:
        raise ConfigError(
            f"--sweep wants NAME=VALUE,VALUE,... with an option of train, got {text!r}. {nearest(name, known)}"
        )
    return name, [value.strip() for value in values.split(",") if value.strip()]


def _grid(axes: Sequence[tuple[str, list[str]]]) -> list[dict[str, str]]:
    names = [name for name, _ in axes]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*(values for _, values in axes))]


def _typed(option: str, text: str) -> Any:
    """A value of the sweep as the option wants it: a number where it looks like one."""
    with suppress(ValueError):
        return as_fields(TrainConfig, {option: json.loads(text)}, "--sweep")[option]
    return as_fields(TrainConfig, {option: text}, "--sweep")[option]
