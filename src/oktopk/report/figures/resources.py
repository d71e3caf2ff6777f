"""Seconds and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from oktopk.plotting.bars import Bar, draw_bars
from oktopk.plotting.frame import Axis
from oktopk.plotting.lines import Chart, Series, draw_stack
from oktopk.plotting.scales import say
from oktopk.report import numbers
from oktopk.report.figures.base import (
    Figure,
    id_for,
    line_figure,
    per_run,
    switch_marks,
)
from oktopk.report.runs import Run, StepLine

_COLORS = {
    "turn": "muted", "data": "p0", "forward": "p1", "backward": "p2", "wait": "c6", "optimizer": "p9",
    "select": "p3", "pack": "p4", "exchange": "p5", "sum": "p6", "gather": "p7", "unpack": "p8",
}  # fmt: skip


def resources(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        caption = "Seconds of every step, stacked; what backward does not hide of the communication is wait."
        yield _stack(runs, run, "phases", "Time per step", caption, numbers.loop_seconds)
    for run in runs:
        caption = "Seconds of the communication thread in every step, beside backward where the two overlap."
        yield _stack(runs, run, "communication", "Communication per step", caption, numbers.communication_seconds)
    yield _mean_step(runs)
    yield line_figure(
        "memory",
        "Memory",
        "Peak resident memory of rank 0 so far.",
        Axis("step"),
        Axis("peak memory", "bytes", zero=True),
        [*per_run(runs, "peak memory", lambda step: step.memory_bytes)],
    )
    if any(step.gpu_peak_bytes is not None for run in runs for step in run.steps):
        yield _gpu_memory(runs)


def _gpu_memory(runs: Sequence[Run]) -> Figure:
    series = [
        *per_run(runs, "peak", lambda step: step.gpu_peak_bytes),
        *per_run(runs, "allocated", lambda step: step.gpu_allocated_bytes, style="dashed", second=1),
        *(per_run(runs, "reserved", lambda step: step.gpu_reserved_bytes, second=2) if len(runs) == 1 else ()),
    ]
    caption = "What tensors took of rank 0's GPU at most and after each step, and what torch holds to hand out again."
    return line_figure("gpu-memory", "GPU memory", caption, Axis("step"), Axis("memory", "bytes", zero=True), series)


def _stack(
    runs: Sequence[Run],
    run: Run,
    name: str,
    title: str,
    caption: str,
    seconds_of: Callable[[StepLine], Mapping[str, float]],
) -> Figure:
    figure_id = id_for(runs, run, name)
    title = title if len(runs) == 1 else f"{title}: {run.name}"
    timed = [(float(step.step), seconds_of(step)) for step in run.steps if step.seconds or step.reduce]
    if not timed:
        return Figure(figure_id, title, caption)
    series = []
    for phase, color in _COLORS.items():
        x, y = numbers.thin([step for step, _ in timed], [seconds.get(phase, 0.0) for _, seconds in timed], most=60)
        if any(y):
            series.append(Series(phase, x, y, color))
    if not series or len(timed) < 2:
        return Figure(figure_id, title, caption, missing="Fewer than two steps were timed.")
    chart = Chart(Axis("step"), Axis("per step", "seconds"), series, switch_marks([run]))
    return Figure(figure_id, title, caption, draw_stack(chart))


def _mean_step(runs: Sequence[Run]) -> Figure:
    bars = []
    for run in runs:
        for kind in ("dense", "sparse"):
            timed = [step for step in run.steps if step.reduce and step.reduce.phase == kind]
            if timed:
                bars += _mean_bars(f"{kind} steps" if len(runs) == 1 else f"{run.name}, {kind}", timed)
    caption = "Means over the steps of each kind: above the loop, below the communication thread."
    if not bars:
        return Figure("mean-phases", "Mean step", caption)
    return Figure("mean-phases", "Mean step", caption, draw_bars(bars, Axis("per step", "seconds")))


def _mean_bars(label: str, timed: Sequence[StepLine]) -> list[Bar]:
    share = numbers.hidden(timed)
    note = f"{len(timed)} steps" + (f", {say(share, 'share')} of communication hidden" if share is not None else "")
    loop = _mean_parts([numbers.loop_seconds(step) for step in timed])
    return [Bar(label, loop, note), Bar("", _mean_parts([numbers.communication_seconds(step) for step in timed]))]


def _mean_parts(seconds: Sequence[Mapping[str, float]]) -> list[tuple[str, float, str]]:
    parts = [(phase, fmean(one.get(phase, 0.0) for one in seconds), color) for phase, color in _COLORS.items()]
    return [part for part in parts if part[1] > 0]
