"""Loss and metric, against steps, time and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oktopk.plotting.frame import Axis
from oktopk.plotting.lines import Series
from oktopk.report import numbers
from oktopk.report.figures.base import (
    AXES,
    Figure,
    Pick,
    colored,
    line_figure,
    series_name,
    switch_marks,
)
from oktopk.report.runs import Run

_WORDS = {"step": "step", "time": "wall time", "bytes": "bytes sent"}


def learning(runs: Sequence[Run]) -> Iterator[Figure]:
    for key, axis, pick in AXES:
        yield _loss(runs, key, axis, pick)
    name = next((found for run in runs if (found := numbers.metric_name(run))), None)
    for key, axis, pick in AXES:
        yield _metric(runs, name, key, axis, pick)


def _loss(runs: Sequence[Run], key: str, axis: Axis, pick: Pick) -> Figure:
    series: list[Series] = []
    for color, run in colored(runs):
        places = pick(numbers.progress(run))
        pairs = [(x, step.loss) for x, step in zip(places, run.steps, strict=True) if step.loss is not None]
        x, y = numbers.thin([x for x, _ in pairs], [loss for _, loss in pairs if loss is not None])
        if x:
            series.append(Series(series_name(runs, run, "each step"), x, y, color, "faint"))
            series.append(Series(series_name(runs, run, "training loss"), x, numbers.smooth(y), color))
        if len(runs) == 1:
            series += _validation(run, "loss", places, "validation loss", "c1")
    caption = "Thin: as measured. Thick: its running median." if key == "step" else ""
    title, ends = f"Loss against {_WORDS[key]}", [] if key == "step" else [0.0]
    return line_figure(f"loss-{key}", title, caption, axis, Axis("loss"), series, switch_marks(runs, pick), ends=ends)


def _metric(runs: Sequence[Run], name: str | None, key: str, axis: Axis, pick: Pick) -> Figure:
    if name is None:
        title = f"Validation metric against {_WORDS[key]}"
        return Figure(f"metric-{key}", title, "", missing="Nothing was validated in this run.")
    series = []
    for color, run in colored(runs):
        series += _validation(run, name, pick(numbers.progress(run)), series_name(runs, run, name), color)
    better = "lower" if numbers.lower_is_better(runs, name) else "higher"
    title = f"{name} against {_WORDS[key]}"
    caption = f"On the validation set; {better} is better." if key == "step" else ""
    ends = [0.0, *(x for run in runs for x in pick(numbers.progress(run)))]
    marks = switch_marks(runs, pick)
    return line_figure(f"metric-{key}", title, caption, axis, Axis(name, zero=True), series, marks, ends=ends)


def _validation(run: Run, name: str, places: Sequence[float], label: str, color: str) -> list[Series]:
    epochs, values = numbers.validated(run, name)
    known = [(x, y) for x, y in zip(numbers.at_epoch_ends(run, places, epochs), values, strict=True) if x is not None]
    return [Series(label, [x for x, _ in known], [y for _, y in known], color, "points")] if known else []
