"""The figures of benchmarks: what is drawn of which result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oktopk.bench.allreduce import AllreduceResult
from oktopk.bench.step import StepResult
from oktopk.bench.validate import Comparison
from oktopk.config import AUTO, WIRES
from oktopk.plotting.bars import Bar, draw_labelled_bars
from oktopk.plotting.drawing import Drawing
from oktopk.plotting.frame import Axis, Frame, Marker
from oktopk.plotting.lines import Chart, Series, Style, draw_lines
from oktopk.plotting.scales import say

WIDE, SQUARE = Frame(560, 320), Frame(440, 420)
COLORS = {
    "dense": "c7",
    "topka": "c1",
    "topkdsa": "c4",
    "gtopk": "c3",
    "gaussiank": "c5",
    "randomk": "c6",
    "oktopk": "c2",
}
OURS, OTHERS, FLOOR = "c2", "muted", "p0"


def step_times(results: Sequence[StepResult]) -> Drawing:
    """Bars: the floor, what synchronisation adds to it, and whiskers from the fastest to the slowest step."""
    fastest_first = sorted(results, key=lambda result: result.step_seconds)
    return draw_labelled_bars([_step_bar(result) for result in fastest_first], Axis("one step", "seconds"))


def _step_bar(result: StepResult) -> Bar:
    is_ours = result.contender == AUTO or result.contender.startswith("oktopk")
    whose, color = ("ours", OURS) if is_ours else ("others", OTHERS)
    computation = min(result.step_seconds, result.floor_seconds)
    parts = [("computation", computation, FLOOR)]
    if result.contender != "floor":
        parts.append((f"synchronisation, {whose}", max(0.0, result.step_seconds - computation), color))
    return Bar(result.contender, parts, say(result.step_seconds, "seconds"), (result.fastest, result.slowest))


def volume_by_world(results: Sequence[AllreduceResult]) -> Drawing:
    """Lines: bytes received per rank as the world grows."""
    series = []
    for algorithm, color in COLORS.items():
        mine = sorted((float(r.world_size), r.bytes_received) for r in results if r.algorithm == algorithm)
        if mine:
            # gaussiank receives what topka does: both shall be seen.
            style: Style = "dashed" if algorithm == "gaussiank" else "points"
            series.append(Series(algorithm, [x for x, _ in mine], [y for _, y in mine], color, style))
    sizes = tuple(sorted({float(r.world_size) for r in results}))
    x, y = Axis("ranks", log=True, ticks=sizes), Axis("received per rank", "bytes", log=True)
    return draw_lines(Chart(x, y, series, frame=WIDE))


def volume_against_bounds(results: Sequence[AllreduceResult]) -> Drawing:
    """Bars: words over k(P-1)/P, with the lower bound 2 and the bound 6; one row per density."""
    sparse = sorted(
        (r for r in results if r.algorithm != "dense"),
        key=lambda r: ([*COLORS].index(r.algorithm), WIRES.index(r.wire), r.density),
    )
    densities = sorted({r.density for r in sparse})
    bars, above = [], ""
    for r in sparse:
        label = f"{r.algorithm} {r.wire}"
        part = (f"density {r.density:g}", r.words_over_k, f"c{densities.index(r.density)}")
        bars.append(Bar("" if label == above else label, [part], f"{r.words_over_k:.2f}"))
        above = label
    bounds = [Marker(2.0, "lower bound 2k"), Marker(6.0, "Ok-Topk's bound 6k")]
    return draw_labelled_bars(bars, Axis("words received / (k (P-1)/P)"), bounds)


def speedup_lines(curves: Mapping[str, Sequence[tuple[float, float]]], x: Axis) -> Drawing:
    """Lines of speed-up over dense; above 1 it pays."""
    series = [
        Series(name, [x for x, _ in points], [y for _, y in points], f"c{n}")
        for n, (name, points) in enumerate(curves.items())
    ]
    ends = [x for one in series for x in one.x]
    level = Series("as fast as dense", [min(ends), max(ends)], [1.0, 1.0], "muted", "reference")
    y = Axis("speed-up over dense", log=True, include=(0.5, 2.0))
    return draw_lines(Chart(x, y, [*series, level], frame=WIDE))


def predicted_against_measured(comparisons: Mapping[str, Sequence[Comparison]]) -> Drawing:
    """Dots on the diagonal were predicted exactly; the band is 30%."""
    seconds = [value for rows in comparisons.values() for c in rows for value in (c.measured, c.predicted)]
    low, high = min(seconds) / 1.3, max(seconds) * 1.3
    band = Series("within 30%", [low, high, high, low], [low * 0.7, high * 0.7, high * 1.3, low * 1.3], "p0", "band")
    diagonal = Series("exact", [low, high], [low, high], "muted", "reference")
    dots = [
        Series(network, [c.measured for c in rows], [c.predicted for c in rows], f"c{n}", "dots")
        for n, (network, rows) in enumerate(comparisons.items())
    ]
    # The same range on both sides, so that the diagonal is one.
    x, y = (Axis(what, "seconds", log=True, include=(low * 0.7, high * 1.3)) for what in ("measured", "predicted"))
    return draw_lines(Chart(x, y, [band, diagonal, *dots], frame=SQUARE))
