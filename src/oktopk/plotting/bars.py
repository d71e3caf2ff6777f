"""Bars: rows laid out from the left, and histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from oktopk.plotting.drawing import Drawing, Legend, text_width
from oktopk.plotting.frame import Axis, Frame, Marker
from oktopk.plotting.lines import Series
from oktopk.plotting.scales import Scale, Unit, plain, say, scale_for

ROW = 24  # height of one line of horizontal bars
THICK = 14  # of a bar


@dataclass(frozen=True)
class Bar:
    """One row of parts laid end to end."""

    label: str
    parts: Sequence[tuple[str, float, str]]  # name, value, colour
    note: str = ""
    spread: tuple[float, float] | None = None  # whiskers: the least and the most that the whole row was

    @property
    def total(self) -> float:
        return sum(value for _, value, _ in self.parts)


def draw_bars(bars: Sequence[Bar], axis: Axis) -> Drawing:
    """Horizontal bars with labels above them; a bar without a label belongs to the one above."""
    heights = [2 * ROW if bar.label else ROW * 2 // 3 for bar in bars]
    frame = Frame(left=8)
    frame = replace(frame, height=frame.top + sum(heights) + frame.bottom)
    scale, parts, top = _scale(bars), [], frame.top
    for bar, height in zip(bars, heights, strict=True):
        top += height
        base = top - ROW // 2
        parts.append(f'<text class="row" x="{frame.left}" y="{base - 7}">{escape(bar.label)}</text>')
        parts.append(f'<text class="note end" x="{frame.end}" y="{base - 7}">{escape(bar.note)}</text>')
        parts += _bar(bar, frame, scale, base, axis.unit)
    return _rows(bars, axis, frame, scale, parts)


def draw_labelled_bars(bars: Sequence[Bar], axis: Axis, markers: Sequence[Marker] = (), width: int = 560) -> Drawing:
    """Horizontal bars with labels at their left and notes at their ends: for many rows on a wide page."""
    pitch = THICK + 8
    frame = Frame(
        width,
        left=round(max(text_width(bar.label) for bar in bars)) + 10,
        right=round(max(text_width(bar.note) for bar in bars)) + 10,
        top=18 if markers else 6,
    )
    frame = replace(frame, height=frame.top + pitch * len(bars) + frame.bottom)
    scale, parts, notes = _scale(bars, [marker.x for marker in markers]), [], []
    for n, bar in enumerate(bars):
        top = frame.top + pitch * n + 4
        ends = frame.at_x(scale, max(bar.total, *(bar.spread or (0.0,))))
        parts += _bar(bar, frame, scale, top, axis.unit)
        parts.append(f'<text class="row end" x="{frame.left - 8}" y="{top + 11}">{escape(bar.label)}</text>')
        notes.append(f'<text class="note" x="{ends + 6}" y="{top + 11}">{escape(bar.note)}</text>')
    lines = frame.marker_lines(markers, scale) + frame.marker_words(markers, scale)
    return _rows(bars, axis, frame, scale, [*parts, *lines, *notes])


def draw_histogram(x: Axis, y: Axis, edges: Sequence[float], columns: Sequence[Series]) -> Drawing:
    """Counts between edges as steps; the y of each series has one entry per bin."""
    frame, x_scale = Frame(), Scale(edges[0], edges[-1], x.log)
    y_scale = y.scale([count for one in columns for count in one.y])
    parts = frame.axes(x, y, x_scale, y_scale)
    sharing = _sharing(columns)
    for one in columns:
        parts += _columns(one, edges, frame, x_scale, y_scale, x.unit, sharing)
    words = "; ".join(f"{one.name}: {plain(sum(one.y))} in all" for one in columns)
    legend = [Legend(one.name, one.color, one.style) for one in columns]
    return Drawing("".join(parts), frame.width, frame.height, words, y.label, legend)


def _scale(bars: Sequence[Bar], others: Sequence[float] = ()) -> Scale:
    most = [max(bar.total, *(bar.spread or (0.0,))) for bar in bars]
    return scale_for([*most, *others], zero=True)


def _rows(bars: Sequence[Bar], axis: Axis, frame: Frame, scale: Scale, parts: Sequence[str]) -> Drawing:
    shapes = "".join([*frame.x_axis(axis, scale), *parts])
    return Drawing(shapes, frame.width, frame.height, _describe(bars, axis), legend=_legend(bars))


def _bar(bar: Bar, frame: Frame, scale: Scale, top: int, unit: Unit) -> list[str]:
    parts, so_far = [], 0.0
    for name, value, color in bar.parts:
        start, end = frame.at_x(scale, so_far), frame.at_x(scale, so_far + value)
        tip = escape(f"{bar.label} {name}: {say(value, unit)}".strip(), quote=True)
        parts.append(
            f'<rect data-tip="{tip}" style="fill:var(--{color})" x="{start}" y="{top}" width="{end - start:.1f}" '
            f'height="{THICK}"><title>{tip}</title></rect>'
        )
        so_far += value
    if bar.spread is not None:
        low, high = (frame.at_x(scale, value) for value in bar.spread)
        middle = top + THICK / 2
        parts.append(f'<path class="whisker" d="M{low} {middle}H{high}M{low} {middle - 3}v6M{high} {middle - 3}v6"/>')
    return parts


def _legend(bars: Sequence[Bar]) -> list[Legend]:
    longest_first = sorted(bars, key=lambda bar: -len(bar.parts))
    names = {name: color for bar in longest_first for name, _, color in bar.parts}
    return [Legend(name, color, "area") for name, color in names.items()] if len(names) > 1 else []


def _describe(bars: Sequence[Bar], axis: Axis) -> str:
    return "; ".join(
        f"{bar.label} " + ", ".join(f"{name} {say(value, axis.unit)}" for name, value, _ in bar.parts if value)
        for bar in bars
    )


def _sharing(columns: Sequence[Series]) -> dict[int, list[str]]:
    """Which series stand side by side in each bin; areas are drawn over each other instead."""
    beside = [one for one in columns if one.style != "area"]
    bins = range(len(columns[0].y)) if columns else range(0)
    return {n: [one.name for one in beside if one.y[n] > 0] for n in bins}


def _columns(
    one: Series,
    edges: Sequence[float],
    frame: Frame,
    xs: Scale,
    ys: Scale,
    unit: Unit,
    sharing: Mapping[int, list[str]],
) -> list[str]:
    parts = []
    for n, count in enumerate(one.y):
        if count <= 0:
            continue
        start, end, top = frame.at_x(xs, edges[n]), frame.at_x(xs, edges[n + 1]), frame.at_y(ys, count)
        if one.name in sharing[n]:
            share = (end - start) / len(sharing[n])
            start += share * sharing[n].index(one.name)
            end = start + share
        tip = escape(f"{one.name}: {plain(count)} from {say(edges[n], unit)} to {say(edges[n + 1], unit)}", quote=True)
        width, height = max(0.5, end - start - 0.5), max(0.5, frame.base - top)
        parts.append(
            f'<rect class="column" data-tip="{tip}" style="fill:var(--{one.color})" x="{start:.1f}" y="{top}" '
            f'width="{width:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    return parts
