"""`oktopk results`: train every workload's small preset under every contender and write docs/results.md."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from oktopk.bench.results import CONTENDERS, Trial, read_outcome, rows, section, trials, write_section
from oktopk.cli.console import console
from oktopk.cli.train import Train
from oktopk.errors import ConfigError, nearest
from oktopk.workloads import WORKLOADS


@dataclass(frozen=True)
class Results:
    """Train small presets under several algorithms and seeds, and write what came of it.

    `updates` among the algorithms is local steps: `oktopk train --reduce updates --algorithm randomk`. Finished runs
    are kept and not repeated, so it can be interrupted and called again. The page is written after each run; all 84 of
    them take about two hours on 2 idle cores.

    Example:
      oktopk results --workloads vision --algorithms oktopk --seeds 0 --epochs 1 --runs runs/trial --out trial.md
    """

    workloads: str = "vision,bert,ptb,gpt"  # separated by commas
    algorithms: str = "dense,topka,gtopk,gaussiank,topkdsa,oktopk,updates"  # separated by commas
    seeds: str = "0,1,2"  # separated by commas
    workers: int = 2  # processes to start for each training
    runs: Path = Path("runs/results")  # where the runs are kept
    out: Path = Path("docs/results.md")  # page whose generated part is replaced
    epochs: int | None = None  # instead of the preset's, for a trial: keep its runs apart with --runs

    def __call__(self) -> int:
        wanted = self._trials()
        for trial in wanted:
            if read_outcome(self.runs, trial) is None:
                console().print(f"== {trial.name}", markup=False)
                code = self._train(trial)
                if code or read_outcome(self.runs, trial) is None:
                    console().print(f"{trial.name} did not run to its end: call again to go on.", markup=False)
                    return code or 1
                self._write(wanted)
        return self._write(wanted)

    def _trials(self) -> list[Trial]:
        workloads, algorithms = self.workloads.split(","), self.algorithms.split(",")
        _require(workloads, WORKLOADS)
        _require(algorithms, CONTENDERS)
        if not all(seed.isdigit() for seed in self.seeds.split(",")):
            raise ConfigError(f"seeds must be numbers separated by commas, got {self.seeds!r}.")
        return trials(workloads, algorithms, [int(seed) for seed in self.seeds.split(",")])

    def _train(self, trial: Trial) -> int:
        # What an interrupted call left behind is made again: a run is minutes.
        shutil.rmtree(self.runs / trial.name, ignore_errors=True)
        return Train(
            workload=trial.workload,
            seed=trial.seed,
            workers=self.workers,
            runs=self.runs,
            name=trial.name,
            epochs=self.epochs,
            tensorboard=False,
            quiet=True,
            **CONTENDERS[trial.contender],
        )()

    def _write(self, wanted: list[Trial]) -> int:
        outcomes = [outcome for trial in wanted if (outcome := read_outcome(self.runs, trial)) is not None]
        if not outcomes:
            console().print("no training ran to its end: nothing is written.", markup=False)
            return 1
        write_section(self.out, section(rows(outcomes), "oktopk results", self.workers))
        return 0


def _require(names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown name {name!r}. {nearest(name, known)}")
