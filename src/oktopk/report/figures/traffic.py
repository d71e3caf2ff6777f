"""Bytes and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from oktopk.metrics import merge_sizes
from oktopk.plotting.bars import draw_histogram
from oktopk.plotting.frame import Axis
from oktopk.plotting.lines import Series
from oktopk.report import numbers
from oktopk.report.figures.base import (
    Figure,
    colored,
    id_for,
    line_figure,
    of_reduction,
    per_run,
    series_name,
    switch_marks,
)
from oktopk.report.numbers import WORD
from oktopk.report.runs import Run, StepLine


def traffic(runs: Sequence[Run]) -> Iterator[Figure]:
    yield _bounds(runs)
    yield _spent(runs)
    for run in runs:
        yield _messages(runs, run)


def _bounds(runs: Sequence[Run]) -> Figure:
    series = [*per_run(runs, "received", of_reduction("bytes_received"))]
    first = next((run for run in runs if any(map(numbers.is_sparse, run.steps))), None)
    world = numbers.world_size(first) if first else None
    if first and world and world > 1:
        for factor, words in ((6, "6k bound of Ok-Topk"), (2, "2k lower bound")):
            steps, allowed = numbers.points(first, _bound(factor, world), numbers.is_sparse)
            series.append(Series(words, steps, allowed, "muted" if factor == 6 else "faint-ink", "reference"))
    caption = (
        "Received by rank 0 in each step. Ok-Topk promises at most 6k(P-1)/P words of 32 bits; no method that sums k "
        "entries of every rank can do with fewer than 2k(P-1)/P, unless it makes the words shorter."
    )
    return line_figure(
        "bounds",
        "Bytes against the bounds",
        caption,
        Axis("step"),
        Axis("received per step", "bytes", log=True),
        series,
        switch_marks(runs),
    )


def _bound(factor: int, world: int) -> Callable[[StepLine], float | None]:
    return lambda step: factor * step.reduce.k * (world - 1) / world * WORD if step.reduce else None


def _spent(runs: Sequence[Run]) -> Figure:
    series = []
    for color, run in colored(runs):
        if run.steps:
            x, y = numbers.thin([float(step.step) for step in run.steps], numbers.progress(run).sent)
            series.append(Series(series_name(runs, run, "sent"), x, y, color))
    if runs[0].steps:
        would = accumulate(float(step.reduce.dense_bytes) if step.reduce else 0.0 for step in runs[0].steps)
        x, y = numbers.thin([float(step.step) for step in runs[0].steps], list(would))
        series.append(Series("all dense would send", x, y, "muted", "reference"))
    caption = "Total sent by rank 0 since the beginning, and what plain all-reduce would have sent."
    return line_figure(
        "spent", "Traffic so far", caption, Axis("step"), Axis("sent", "bytes", zero=True), series, switch_marks(runs)
    )


def _messages(runs: Sequence[Run], run: Run) -> Figure:
    figure_id = id_for(runs, run, "messages")
    title = "Message sizes" if len(runs) == 1 else f"Message sizes: {run.name}"
    sizes = _sizes(run)
    if not sizes:
        return Figure(figure_id, title, "", missing="No messages were recorded.")
    largest = max(size for counts in sizes.values() for size in counts)
    edges = [float(2**power) for power in range(max(2, largest.bit_length() + 1))]
    columns = [
        Series(operation, edges[:-1], _binned(counts, len(edges) - 1), f"c{slot}")
        for slot, (operation, counts) in enumerate(sorted(sizes.items()))
    ]
    first = min((n for one in columns for n, count in enumerate(one.y) if count), default=0)
    columns = [Series(one.name, edges[first:-1], one.y[first:], one.color) for one in columns]
    x, y = Axis("size of a message", "bytes", log=True), Axis("messages", log=True, include=(1.0,))
    caption = "Messages that rank 0 sent over the whole run, by operation; bins double in size."
    return Figure(figure_id, title, caption, draw_histogram(x, y, edges[first:], columns))


def _sizes(run: Run) -> dict[str, dict[int, int]]:
    merged = merge_sizes(record.message_sizes for record in numbers.reductions(run))
    return {operation: sizes for operation, sizes in merged.items() if any(sizes)}


def _binned(counts: dict[int, int], bins: int) -> list[float]:
    found = [0.0] * bins
    for size, count in counts.items():
        if size > 0:
            found[min(bins - 1, size.bit_length() - 1)] += count
    return found
