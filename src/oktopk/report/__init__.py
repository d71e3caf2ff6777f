"""Run directories to one HTML page.

from oktopk.report import write_report
write_report(["runs/dense", "runs/oktopk"], "comparison.html")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oktopk.errors import ConfigError
from oktopk.report.page import render
from oktopk.report.runs import Run, latest_run, read_run

__all__ = ["Run", "latest_run", "read_run", "write_report"]


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page for one run (`RUN/report.html`) or several (`comparison.html` beside the first) and say where."""
    if not runs:
        raise ConfigError("a report needs at least one run directory, got none.")
    target = Path(output) if output is not None else _default_output([Path(run) for run in runs])
    page = render(_distinct([read_run(run) for run in runs]))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def _default_output(runs: Sequence[Path]) -> Path:
    return runs[0] / "report.html" if len(runs) == 1 else runs[0].parent / "comparison.html"


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same name are told apart by their parents."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.path.resolve().parent.name}/{run.name}")
        for run in runs
    ]
