"""Charts as SVG text. Colours are CSS variables of the page, so that one drawing serves light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from oktopk.report.scales import Scale, Unit, plain, say, scale_for, tight, unit_of

WIDTH, HEIGHT = 420, 262
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 14, 42  # margins
ROW = 24  # height of one line of horizontal bars

Style = Literal["line", "faint", "dashed", "reference", "points", "area"]


@dataclass(frozen=True)
class Series:
    """Points of one thing over a common x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str  # a CSS variable of the page: "c0", "p3"
    style: Style = "line"


@dataclass(frozen=True)
class Axis:
    label: str
    unit: Unit = "number"
    log: bool = False
    zero: bool = False  # begin at zero
    include: tuple[float, ...] = ()  # values that the range must hold: keeps noise from filling the chart


@dataclass(frozen=True)
class Marker:
    """A vertical line with a word."""

    x: float
    label: str
    color: str = "muted"


@dataclass(frozen=True)
class Chart:
    """A drawing of lines."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    markers: Sequence[Marker] = ()
    x_scale: Scale | None = None


@dataclass(frozen=True)
class Drawing:
    """SVG text, what it says in words, its legend, and what hovering needs."""

    svg: str
    description: str
    legend: Sequence[tuple[str, str, str]] = ()  # name, colour, style
    hover: Mapping[str, Any] = field(default_factory=dict)


def draw_lines(chart: Chart) -> Drawing:
    """Lines, points and references over one x axis."""
    x_scale = chart.x_scale or tight([x for series in chart.series for x in series.x])
    y_scale = _y_scale(chart.y, [y for series in chart.series for y in _typical(series)])
    parts = _axes(chart.x, chart.y, x_scale, y_scale)
    parts += [_mark_line(marker, x_scale) for marker in chart.markers]
    parts += [part for series in chart.series for part in _series(series, x_scale, y_scale)]
    parts += [_mark_word(marker, x_scale) for marker in chart.markers]
    shown = [series for series in chart.series if series.style != "faint"]
    return Drawing(
        _svg(parts, HEIGHT),
        _describe_lines(chart),
        [(series.name, series.color, series.style) for series in shown],
        _hover(chart, shown, x_scale, y_scale),
    )


def draw_stack(x: Axis, y: Axis, series: Sequence[Series], markers: Sequence[Marker] = ()) -> Drawing:
    """Areas on top of each other; all series share the x of the first."""
    below = [0.0] * len(series[0].x)
    tops = []
    for one in series:
        below = [a + b for a, b in zip(below, one.y, strict=True)]
        tops.append(below)
    x_scale, y_scale = tight(series[0].x), scale_for(below, zero=True)
    parts = _axes(x, y, x_scale, y_scale)
    for one, top in reversed(list(zip(series, tops, strict=True))):
        outline = Series(one.name, one.x, top, one.color, "area")
        parts += _series(outline, x_scale, y_scale)
    parts += [draw(marker, x_scale) for marker in markers for draw in (_mark_line, _mark_word)]
    chart = Chart(x, y, series, markers, x_scale=x_scale)
    hover = _hover(chart, series, x_scale, y_scale)
    return Drawing(
        _svg(parts, HEIGHT),
        _describe_lines(chart),
        [(s.name, s.color, "area") for s in series],
        hover | {"stack": True},
    )


@dataclass(frozen=True)
class Bar:
    """One row of parts laid end to end."""

    label: str
    parts: Sequence[tuple[str, float, str]]  # name, value, colour
    note: str = ""


def draw_bars(bars: Sequence[Bar], axis: Axis) -> Drawing:
    """Horizontal bars, stacked where a row has several parts; a bar without a label belongs to the one above."""
    height = TOP + sum(map(_row_height, bars)) + BOTTOM
    scale = scale_for([sum(value for _, value, _ in bar.parts) for bar in bars], zero=True)
    plot, top = _Plot(left=8, height=height), TOP
    parts = plot.x_axis(axis, scale)
    for bar in bars:
        base = top + _row_height(bar) - ROW // 2
        parts.append(f'<text class="row" x="8" y="{base - 7}">{escape(bar.label)}</text>')
        parts.append(f'<text class="note" x="{WIDTH - RIGHT}" y="{base - 7}">{escape(bar.note)}</text>')
        parts += _bar(bar, plot, scale, base, axis.unit)
        top += _row_height(bar)
    return Drawing(_svg(parts, height), _describe_bars(bars, axis), _bar_legend(bars))


def _row_height(bar: Bar) -> int:
    return 2 * ROW if bar.label else ROW * 2 // 3


def _bar_legend(bars: Sequence[Bar]) -> list[tuple[str, str, str]]:
    longest_first = sorted(bars, key=lambda bar: -len(bar.parts))
    names = {name: color for bar in longest_first for name, _, color in bar.parts}
    return [(name, color, "area") for name, color in names.items()] if len(names) > 1 else []


def _describe_bars(bars: Sequence[Bar], axis: Axis) -> str:
    return "; ".join(
        f"{bar.label} " + ", ".join(f"{name} {say(value, axis.unit)}" for name, value, _ in bar.parts if value)
        for bar in bars
    )


def draw_histogram(x: Axis, y: Axis, edges: Sequence[float], columns: Sequence[Series]) -> Drawing:
    """Counts between edges as steps; the y of each series has one entry per bin."""
    x_scale = Scale(edges[0], edges[-1], x.log)
    y_scale = _y_scale(y, [count for one in columns for count in one.y])
    parts = _axes(x, y, x_scale, y_scale)
    sharing = _sharing(columns)
    for one in columns:
        parts += _columns(one, edges, x_scale, y_scale, x.unit, sharing)
    words = "; ".join(f"{one.name}: {plain(sum(one.y))} in all" for one in columns)
    return Drawing(_svg(parts, HEIGHT), words, [(one.name, one.color, one.style) for one in columns])


@dataclass(frozen=True)
class _Plot:
    """The rectangle that values are drawn into."""

    left: int = LEFT
    height: int = HEIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def at_x(self, scale: Scale, value: float) -> float:
        return round(self.left + scale.fraction(value) * (WIDTH - RIGHT - self.left), 1)

    def at_y(self, scale: Scale, value: float) -> float:
        return round(self.bottom - scale.fraction(value) * (self.bottom - TOP), 1)

    def x_axis(self, axis: Axis, scale: Scale) -> list[str]:
        parts = []
        for tick, label in _labels(axis, scale):
            x = self.at_x(scale, tick)
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{self.bottom}"/>')
            parts.append(f'<text class="tick x" x="{x}" y="{self.bottom + 16}">{label}</text>')
        middle = (self.left + WIDTH - RIGHT) / 2
        parts.append(f'<text class="label" x="{middle}" y="{self.height - 6}">{escape(_title(axis, scale))}</text>')
        return parts


def _axes(x: Axis, y: Axis, x_scale: Scale, y_scale: Scale) -> list[str]:
    plot = _Plot()
    parts = plot.x_axis(x, x_scale)
    for tick, label in _labels(y, y_scale):
        at = plot.at_y(y_scale, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{at + 4}">{label}</text>')
    base = plot.bottom
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}"/>')
    return parts


def _labels(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    """Ticks and their words: the unit stands in the title, except on logarithmic axes."""
    ticks = scale.ticks(axis.unit)
    if scale.log:
        return [(tick, say(tick, axis.unit)) for tick in ticks]
    divisor, _ = unit_of(axis.unit, max(abs(scale.low), abs(scale.high)))
    return [(tick, plain(tick / divisor)) for tick in ticks]


def _title(axis: Axis, scale: Scale) -> str:
    _, suffix = unit_of(axis.unit, max(abs(scale.low), abs(scale.high)))
    return f"{axis.label} ({suffix})" if suffix and not scale.log else axis.label


def y_title(axis: Axis, values: Sequence[float]) -> str:
    """The words above a chart for its y axis."""
    return _title(axis, _y_scale(axis, values))


def _y_scale(axis: Axis, values: Sequence[float]) -> Scale:
    return scale_for([*values, *axis.include], axis.log, axis.zero)


def _mark_line(marker: Marker, scale: Scale) -> str:
    x = _Plot().at_x(scale, marker.x)
    style = f"stroke:var(--{marker.color})"
    return f'<line class="mark" style="{style}" x1="{x}" x2="{x}" y1="{TOP}" y2="{_Plot().bottom}"/>'


def _mark_word(marker: Marker, scale: Scale) -> str:
    x = _Plot().at_x(scale, marker.x)
    shift, anchor = (-4, "end") if x > WIDTH * 0.7 else (4, "start")
    return f'<text class="mark" x="{x + shift}" y="{TOP - 4}" text-anchor="{anchor}">{escape(marker.label)}</text>'


def _typical(series: Series) -> Sequence[float]:
    """What the range of a chart must hold: of thin background lines all but the outermost, which are cut off."""
    if series.style != "faint" or len(series.y) < 20:
        return series.y
    ordered = sorted(series.y)
    return ordered[len(ordered) // 50 : -(len(ordered) // 50) or None]


def _series(series: Series, x_scale: Scale, y_scale: Scale) -> list[str]:
    plot = _Plot()
    points = [
        (plot.at_x(x_scale, x), plot.at_y(y_scale, y))
        for x, y in zip(series.x, series.y, strict=True)
        if not y_scale.log or y > 0
    ]
    if not points:
        return []
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    if series.style == "area":
        path += f"L{points[-1][0]:g} {plot.bottom}L{points[0][0]:g} {plot.bottom}Z"
        return [f'<path class="area" style="fill:var(--{series.color})" d="{path}"/>']
    parts = [f'<path class="{series.style}" style="stroke:var(--{series.color})" d="{path}"/>']
    if series.style == "points" or (len(points) == 1 and series.style != "faint"):
        parts += [f'<circle style="fill:var(--{series.color})" cx="{x:g}" cy="{y:g}" r="3.2"/>' for x, y in points]
    return parts


def _bar(bar: Bar, plot: _Plot, scale: Scale, top: int, unit: Unit) -> list[str]:
    parts, so_far = [], 0.0
    for name, value, color in bar.parts:
        start, end = plot.at_x(scale, so_far), plot.at_x(scale, so_far + value)
        tip = escape(f"{bar.label} {name}: {say(value, unit)}".strip(), quote=True)
        parts.append(
            f'<rect data-tip="{tip}" style="fill:var(--{color})" x="{start}" y="{top}" width="{end - start:.1f}" '
            f'height="{ROW // 2 + 2}"><title>{tip}</title></rect>'
        )
        so_far += value
    return parts


def _sharing(columns: Sequence[Series]) -> dict[int, list[str]]:
    """Which series stand side by side in each bin; areas are drawn over each other instead."""
    beside = [one for one in columns if one.style != "area"]
    bins = range(len(columns[0].y)) if columns else range(0)
    return {n: [one.name for one in beside if one.y[n] > 0] for n in bins}


def _columns(
    one: Series, edges: Sequence[float], xs: Scale, ys: Scale, unit: Unit, sharing: Mapping[int, list[str]]
) -> list[str]:
    plot, parts = _Plot(), []
    for n, count in enumerate(one.y):
        if count <= 0:
            continue
        start, end, top = plot.at_x(xs, edges[n]), plot.at_x(xs, edges[n + 1]), plot.at_y(ys, count)
        if one.name in sharing[n]:
            share = (end - start) / len(sharing[n])
            start += share * sharing[n].index(one.name)
            end = start + share
        tip = escape(f"{one.name}: {plain(count)} from {say(edges[n], unit)} to {say(edges[n + 1], unit)}", quote=True)
        width, height = max(0.5, end - start - 0.5), max(0.5, plot.bottom - top)
        parts.append(
            f'<rect class="column" data-tip="{tip}" style="fill:var(--{one.color})" x="{start:.1f}" y="{top}" '
            f'width="{width:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    return parts


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" TITLES>{"".join(parts)}</svg>'


def _describe_lines(chart: Chart) -> str:
    """What a person who cannot see the chart wants to know of it."""
    said = []
    for series in chart.series:
        if series.style == "faint" or not series.y:
            continue
        first, last = say(series.y[0], chart.y.unit), say(series.y[-1], chart.y.unit)
        said.append(f"{series.name}: {first}" if len(series.y) == 1 else f"{series.name}: from {first} to {last}")
    said += [f"{marker.label} at {plain(marker.x)}" for marker in chart.markers if marker.label]
    return "; ".join(said)


def _hover(chart: Chart, shown: Sequence[Series], x_scale: Scale, y_scale: Scale) -> dict[str, Any]:
    plot = _Plot()
    return {
        "x": {"label": chart.x.label, "unit": chart.x.unit, "low": x_scale.low, "high": x_scale.high},
        "y": {"unit": chart.y.unit, "low": y_scale.low, "high": y_scale.high, "log": y_scale.log},
        "box": [plot.left, TOP, WIDTH - RIGHT, plot.bottom],
        "series": [
            {"name": one.name, "color": one.color, "x": [_short(x) for x in one.x], "y": [_short(y) for y in one.y]}
            for one in shown
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def to_script(hover: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(hover, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
