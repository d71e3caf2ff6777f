"""Charts over an x axis: lines, points, areas on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from oktopk.plotting.drawing import Drawing, Legend
from oktopk.plotting.frame import Axis, Frame, Marker, title_of
from oktopk.plotting.scales import Scale, plain, say, scale_for, tight

Style = Literal["line", "faint", "dashed", "reference", "points", "dots", "area", "band"]


@dataclass(frozen=True)
class Series:
    """Points of one thing over a common x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str  # a name of the palette: "c0", "p3"
    style: Style = "line"  # "points" are joined, "dots" are not; a "band" is a closed outline, filled


@dataclass(frozen=True)
class Chart:
    """What to draw over one x axis."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    markers: Sequence[Marker] = ()
    x_scale: Scale | None = None  # default: what the series need
    frame: Frame = field(default_factory=Frame)


def draw_lines(chart: Chart) -> Drawing:
    """Lines, points and references over one x axis."""
    frame, x_scale = chart.frame, chart.x_scale or _x_scale(chart)
    y_scale = chart.y.scale([y for series in chart.series for y in _typical(series)])
    parts = frame.axes(chart.x, chart.y, x_scale, y_scale)
    parts += frame.marker_lines(chart.markers, x_scale)
    parts += [part for series in chart.series for part in _shapes(series, frame, x_scale, y_scale)]
    parts += frame.marker_words(chart.markers, x_scale)
    shown = [series for series in chart.series if series.style != "faint"]
    return _drawing(chart, parts, shown, x_scale, y_scale)


def draw_stack(chart: Chart) -> Drawing:
    """Areas on top of each other; all series share the x of the first."""
    frame, series = chart.frame, chart.series
    below, tops = [0.0] * len(series[0].x), []
    for one in series:
        below = [a + b for a, b in zip(below, one.y, strict=True)]
        tops.append(below)
    x_scale, y_scale = tight(series[0].x), scale_for(below, zero=True)
    parts = frame.axes(chart.x, chart.y, x_scale, y_scale)
    areas = [replace(one, style="area") for one in series]
    for one, top in reversed(list(zip(areas, tops, strict=True))):
        parts += _shapes(replace(one, y=top), frame, x_scale, y_scale)
    parts += [*frame.marker_lines(chart.markers, x_scale), *frame.marker_words(chart.markers, x_scale)]
    drawing = _drawing(chart, parts, areas, x_scale, y_scale)
    return replace(drawing, hover={**drawing.hover, "stack": True})


def _drawing(chart: Chart, parts: Sequence[str], shown: Sequence[Series], x_scale: Scale, y_scale: Scale) -> Drawing:
    return Drawing(
        "".join(parts),
        chart.frame.width,
        chart.frame.height,
        _describe(chart),
        title_of(chart.y, y_scale),
        [Legend(series.name, series.color, series.style) for series in shown],
        _hover(chart, shown, x_scale, y_scale),
    )


def _x_scale(chart: Chart) -> Scale:
    values = [x for series in chart.series for x in series.x]
    return chart.x.scale(values) if chart.x.log else tight(values)


def _typical(series: Series) -> Sequence[float]:
    """What the range of a chart must hold: of thin background lines all but the outermost, which are cut off."""
    if series.style != "faint" or len(series.y) < 20:
        return series.y
    ordered = sorted(series.y)
    return ordered[len(ordered) // 50 : -(len(ordered) // 50) or None]


def _shapes(series: Series, frame: Frame, x_scale: Scale, y_scale: Scale) -> list[str]:
    points = [
        (frame.at_x(x_scale, x), frame.at_y(y_scale, y))
        for x, y in zip(series.x, series.y, strict=True)
        if not y_scale.log or y > 0
    ]
    if not points:
        return []
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    if series.style in ("area", "band"):
        under = f"L{points[-1][0]:g} {frame.base}L{points[0][0]:g} {frame.base}" if series.style == "area" else ""
        return [f'<path class="{series.style}" style="fill:var(--{series.color})" d="{path}{under}Z"/>']
    parts = []
    if series.style != "dots":
        parts.append(f'<path class="{series.style}" style="stroke:var(--{series.color})" d="{path}"/>')
    if series.style in ("points", "dots") or (len(points) == 1 and series.style != "faint"):
        parts += [f'<circle style="fill:var(--{series.color})" cx="{x:g}" cy="{y:g}" r="3.2"/>' for x, y in points]
    return parts


def _describe(chart: Chart) -> str:
    """What a person who cannot see the chart wants to know of it."""
    said = []
    for series in chart.series:
        if series.style in ("faint", "band") or not series.y:
            continue
        first, last = say(series.y[0], chart.y.unit), say(series.y[-1], chart.y.unit)
        said.append(f"{series.name}: {first}" if len(series.y) == 1 else f"{series.name}: from {first} to {last}")
    said += [f"{marker.label} at {plain(marker.x)}" for marker in chart.markers if marker.label]
    return "; ".join(said)


def _hover(chart: Chart, shown: Sequence[Series], x_scale: Scale, y_scale: Scale) -> dict[str, Any]:
    frame = chart.frame
    return {
        "x": {"label": chart.x.label, "unit": chart.x.unit, "low": x_scale.low, "high": x_scale.high},
        "y": {"unit": chart.y.unit, "low": y_scale.low, "high": y_scale.high, "log": y_scale.log},
        "box": [frame.left, frame.top, frame.end, frame.base],
        "series": [
            {"name": one.name, "color": one.color, "x": [_short(x) for x in one.x], "y": [_short(y) for y in one.y]}
            for one in shown
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
