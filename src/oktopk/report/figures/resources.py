"""Seconds and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from oktopk.plotting.bars import Bar, draw_bars
from oktopk.plotting.frame import Axis
from oktopk.plotting.lines import Chart, Series, draw_stack
from oktopk.report import numbers
from oktopk.report.figures.base import (
    Figure,
    id_for,
    line_figure,
    per_run,
    switch_marks,
)
from oktopk.report.runs import Run, StepLine


def resources(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        yield _phases(runs, run)
    yield _mean_phases(runs)
    yield line_figure(
        "memory",
        "Memory",
        "Peak resident memory of rank 0 so far.",
        Axis("step"),
        Axis("peak memory", "bytes", zero=True),
        [*per_run(runs, "peak memory", lambda step: step.memory_bytes)],
    )


def _phases(runs: Sequence[Run], run: Run) -> Figure:
    figure_id = id_for(runs, run, "phases")
    title = "Time per phase" if len(runs) == 1 else f"Time per phase: {run.name}"
    caption = "Seconds of every step, stacked."
    timed = [(float(step.step), numbers.phase_seconds(step)) for step in run.steps if step.seconds or step.reduce]
    if not timed:
        return Figure(figure_id, title, caption)
    series = []
    for phase in numbers.STEP_PHASES:
        x, y = numbers.thin([step for step, _ in timed], [seconds.get(phase, 0.0) for _, seconds in timed], most=60)
        if any(y):
            series.append(Series(phase, x, y, _phase_color(phase)))
    if not series or len(timed) < 2:
        return Figure(figure_id, title, caption, missing="Fewer than two steps were timed.")
    chart = Chart(Axis("step"), Axis("per step", "seconds"), series, switch_marks([run]))
    return Figure(figure_id, title, caption, draw_stack(chart))


def _mean_phases(runs: Sequence[Run]) -> Figure:
    bars = []
    for run in runs:
        for phase in ("dense", "sparse"):
            timed = [step for step in run.steps if step.reduce and step.reduce.phase == phase]
            if timed:
                bars.append(_mean_bar(runs, run, phase, timed))
    caption = "Mean over the steps of each kind."
    if not bars:
        return Figure("mean-phases", "Mean step", caption)
    return Figure("mean-phases", "Mean step", caption, draw_bars(bars, Axis("per step", "seconds")))


def _mean_bar(runs: Sequence[Run], run: Run, phase: str, timed: Sequence[StepLine]) -> Bar:
    seconds = [numbers.phase_seconds(step) for step in timed]
    parts = [(name, fmean(one.get(name, 0.0) for one in seconds), _phase_color(name)) for name in numbers.STEP_PHASES]
    shown = [part for part in parts if part[1] > 0]
    label = f"{phase} steps" if len(runs) == 1 else f"{run.name}, {phase}"
    return Bar(label, shown, f"{len(timed)} steps")


def _phase_color(phase: str) -> str:
    return f"p{numbers.STEP_PHASES.index(phase)}" if phase in numbers.STEP_PHASES else "muted"
