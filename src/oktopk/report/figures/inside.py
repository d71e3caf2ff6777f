"""What `--analyze-every` looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from oktopk.plotting.bars import draw_histogram
from oktopk.plotting.frame import Axis
from oktopk.plotting.lines import Series, Style
from oktopk.report import numbers
from oktopk.report.figures.base import (
    ANALYZE,
    Figure,
    colored,
    id_for,
    line_figure,
    series_name,
    switch_marks,
)
from oktopk.report.runs import Analysis, Histogram, Run


def inside(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        yield _histograms(runs, run)
    yield _analysed(
        runs,
        "overlap",
        "Overlap with the exact top k",
        "How much of the true global top k the chosen set holds, by count and by energy (sum of squares).",
        Axis("overlap", "share", zero=True),
        [("by energy", lambda a: a.overlap_energy), ("by count", lambda a: a.overlap_count)],
    )
    yield _analysed(
        runs,
        "xi",
        "Assumption 1: ξ",
        "The paper's convergence proof asks how far the sum of local choices is from the true top k, in units of the "
        "gradient's norm. What matters is that ξ stays bounded and small against the number of ranks.",
        Axis("ξ", zero=True),
        [("ξ", lambda a: a.xi)],
    )


def _histograms(runs: Sequence[Run], run: Run) -> Figure:
    figure_id = id_for(runs, run, "histogram")
    title = "Gradient before and after" if len(runs) == 1 else f"Gradient before and after: {run.name}"
    analysis = next((one for one in reversed(run.analyses) if one.before or one.after), None)
    if analysis is None:
        return Figure(figure_id, title, "", missing=ANALYZE)
    caption = (
        f"Entries by magnitude at step {analysis.step}: gradient and residual of rank 0, and the averaged update that "
        "came out of the reduction."
    )
    pairs = [("before selection", analysis.before, "muted"), ("after selection", analysis.after, "c0")]
    known = [(name, histogram, color) for name, histogram, color in pairs if histogram is not None]
    edges = known[0][1].edges
    columns = [
        Series(name, edges[:-1], histogram.counts, color, "area")
        for name, histogram, color in known
        if len(histogram.edges) == len(edges)
    ]
    x = Axis("magnitude", log=_wants_log(known[0][1]))
    y = Axis("entries", log=True, include=(1.0,))
    return Figure(figure_id, title, caption, draw_histogram(x, y, edges, columns))


def _wants_log(histogram: Histogram) -> bool:
    return histogram.edges[0] > 0 and histogram.edges[-1] / histogram.edges[0] > 100


def _analysed(
    runs: Sequence[Run],
    figure_id: str,
    title: str,
    caption: str,
    axis: Axis,
    values: Sequence[tuple[str, Callable[[Analysis], float | None]]],
) -> Figure:
    series = []
    for color, run in colored(runs):
        for slot, (name, value) in enumerate(values):
            known = [(float(one.step), found) for one in run.analyses if (found := value(one)) is not None]
            if known:
                shade = f"c{slot}" if len(runs) == 1 else color
                x, y = numbers.thin([x for x, _ in known], [y for _, y in known])
                style: Style = "dashed" if slot and len(runs) > 1 else "points"
                series.append(Series(series_name(runs, run, name, len(values) > 1), x, y, shade, style))
    return line_figure(figure_id, title, caption, Axis("step"), axis, series, switch_marks(runs), missing=ANALYZE)
