"""`oktopk report`: one HTML page about one or more runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oktopk.cli.console import console
from oktopk.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """One HTML page about one or more runs, readable without a network.

    RUN is a run directory, or the name of one in --runs. Several runs are compared in one page.

    Example:
      oktopk report --latest
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()  # what to report on
    latest: bool = False  # report on the run in --runs that was written to last (added to those named)
    output: Path | None = None  # file to write; default: report.html in the run, or comparison.html beside the first
    runs: Path = Path("runs")  # folder that holds the runs

    def __call__(self) -> int:
        from oktopk.report import write_report

        written = write_report(self._directories(), self.output)
        size = written.stat().st_size / 1000
        console().print(f"report: {written} ({size:.0f} kB; open it in any browser)", markup=False, soft_wrap=True)
        return 0

    def _directories(self) -> list[Path]:
        from oktopk.report import latest_run

        found = [self._find(run) for run in self.run] + ([latest_run(self.runs)] if self.latest else [])
        if not found:
            raise ConfigError(
                f"a report needs a run: name one, e.g. {self.runs}/NAME, or give --latest for the newest."
            )
        return list(dict.fromkeys(found))

    def _find(self, run: str) -> Path:
        is_name = "/" not in run and not Path(run).is_dir()
        return self.runs / run if is_name else Path(run)
