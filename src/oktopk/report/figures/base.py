"""What figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oktopk.plotting.colors import SERIES
from oktopk.plotting.drawing import Drawing
from oktopk.plotting.frame import Axis, Marker
from oktopk.plotting.lines import Chart, Series, Style, draw_lines
from oktopk.plotting.scales import tight
from oktopk.report import numbers
from oktopk.report.numbers import Progress
from oktopk.report.runs import Run, StepLine

ANALYZE = "Not recorded: train with --analyze-every N to have it."


@dataclass(frozen=True)
class Figure:
    """One drawing with its words, or the reason why there is none."""

    id: str
    title: str
    caption: str
    drawing: Drawing | None = None
    missing: str = "No steps were recorded."


Pick = Callable[[Progress], Sequence[float]]

AXES: list[tuple[str, Axis, Pick]] = [
    ("step", Axis("step"), lambda progress: progress.step),
    ("time", Axis("wall time", "seconds"), lambda progress: progress.wall),
    ("bytes", Axis("sent by rank 0", "bytes"), lambda progress: progress.sent),
]


def line_figure(
    figure_id: str,
    title: str,
    caption: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    markers: Sequence[Marker] = (),
    missing: str = "",
    ends: Sequence[float] = (),
) -> Figure:
    if not any(one.y for one in series):
        return Figure(figure_id, title, caption, missing=missing or "No such step was recorded.")
    places = [place for one in series for place in one.x] + list(ends)
    if (x.unit == "bytes" and max(places) == 0) or (y.log and not any(v > 0 for one in series for v in one.y)):
        return Figure(figure_id, title, caption, missing="Nothing was sent: one rank has nobody to send to.")
    inside_range = [marker for marker in markers if min(places) <= marker.x <= max(places)]
    return Figure(figure_id, title, caption, draw_lines(Chart(x, y, series, inside_range, tight(places))))


def per_run(
    runs: Sequence[Run],
    name: str,
    value: Callable[[StepLine], float | None],
    keep: Callable[[StepLine], bool] = bool,
    style: Style = "line",
    second: int = 0,
) -> Iterator[Series]:
    for color, run in colored(runs):
        x, y = numbers.points(run, value, keep)
        if x:
            alone = len(runs) == 1
            word = name if alone else f"{run.name}, {name}" if style == "dashed" else run.name
            yield Series(word, x, y, f"c{second}" if alone else color, "line" if alone else style)


def of_reduction(name: str) -> Callable[[StepLine], float | None]:
    return lambda step: float(getattr(step.reduce, name)) if step.reduce else None


def over_k(name: str) -> Callable[[StepLine], float | None]:
    return lambda step: getattr(step.reduce, name) / step.reduce.k if step.reduce and step.reduce.k else None


def level(series: Sequence[Series], height: float, name: str) -> list[Series]:
    ends = [x for one in series for x in one.x]
    return [Series(name, [min(ends), max(ends)], [height, height], "muted", "reference")] if ends else []


def switch_marks(runs: Sequence[Run], pick: Pick = AXES[0][2]) -> list[Marker]:
    """Where dense steps turn into sparse ones: one line if all runs agree."""
    found: dict[float, str] = {}
    for color, run in colored(runs):
        position = numbers.switch(run)
        if position is not None:
            place = pick(numbers.progress(run))[position]
            found[place] = "muted" if place in found or len(runs) == 1 else color
    return [Marker(x, "dense → sparse" if n == 0 else "", color) for n, (x, color) in enumerate(found.items())]


def colored(runs: Sequence[Run]) -> Iterator[tuple[str, Run]]:
    for slot, run in enumerate(runs):
        yield f"c{slot % SERIES}", run


def series_name(runs: Sequence[Run], run: Run, what: str, always: bool = False) -> str:
    if len(runs) == 1:
        return what
    return f"{run.name}, {what}" if always else run.name


def id_for(runs: Sequence[Run], run: Run, what: str) -> str:
    return what if len(runs) == 1 else f"{what}-{list(runs).index(run)}"
