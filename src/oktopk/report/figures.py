"""The figures of a report: which lines, what they are called, and one sentence on how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from oktopk.metrics import merge_sizes
from oktopk.report import numbers
from oktopk.report.numbers import WORD, Progress
from oktopk.report.runs import Analysis, Histogram, Run, Step
from oktopk.report.scales import tight
from oktopk.report.svg import (
    Axis,
    Bar,
    Chart,
    Drawing,
    Marker,
    Series,
    Style,
    draw_bars,
    draw_histogram,
    draw_lines,
    draw_stack,
    y_title,
)

COLORS = 8
ANALYZE = "Not recorded: train with --analyze-every N to have it."


@dataclass(frozen=True)
class Figure:
    """One drawing with its words, or the reason why there is none."""

    id: str
    title: str
    caption: str
    drawing: Drawing | None = None
    missing: str = "No steps were recorded."
    y_label: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    intro: str
    figures: Sequence[Figure]


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        Section(
            "Learning", "Does it learn as well, and what does that cost in steps, time and traffic?", [*learning(runs)]
        ),
        Section("Selection", "Which part of the gradient was sent, and what is still owed.", [*selection(runs)]),
        Section("Traffic", "What went over the network, against what theory allows.", [*traffic(runs)]),
        Section("Time and memory", "Where a step spends its time on rank 0.", [*resources(runs)]),
        Section("Inside the gradient", "A closer look, taken on a few steps.", [*inside(runs)]),
    ]


# --- learning


Pick = Callable[[Progress], Sequence[float]]

_AXES: list[tuple[str, Axis, Pick]] = [
    ("step", Axis("step"), lambda progress: progress.step),
    ("time", Axis("wall time", "seconds"), lambda progress: progress.wall),
    ("bytes", Axis("sent by rank 0", "bytes"), lambda progress: progress.sent),
]
_WORDS = {"step": "step", "time": "wall time", "bytes": "bytes sent"}


def learning(runs: Sequence[Run]) -> Iterator[Figure]:
    for key, axis, pick in _AXES:
        yield _loss(runs, key, axis, pick)
    name = next((found for run in runs if (found := numbers.metric_name(run))), None)
    for key, axis, pick in _AXES:
        yield _metric(runs, name, key, axis, pick)


def _loss(runs: Sequence[Run], key: str, axis: Axis, pick: Pick) -> Figure:
    series: list[Series] = []
    for color, run in _colored(runs):
        places = pick(numbers.progress(run))
        pairs = [(x, step.loss) for x, step in zip(places, run.steps, strict=True) if step.loss is not None]
        x, y = numbers.thin([x for x, _ in pairs], [loss for _, loss in pairs if loss is not None])
        if x:
            series.append(Series(_name(runs, run, "each step"), x, y, color, "faint"))
            series.append(Series(_name(runs, run, "training loss"), x, numbers.smooth(y), color))
        if len(runs) == 1:
            series += _validation(run, "loss", places, "validation loss", "c1")
    caption = "Thin: as measured. Thick: its running mean." if key == "step" else ""
    title, ends = f"Loss against {_WORDS[key]}", [] if key == "step" else [0.0]
    return _lines(f"loss-{key}", title, caption, axis, Axis("loss"), series, _marks(runs, pick), ends=ends)


def _metric(runs: Sequence[Run], name: str | None, key: str, axis: Axis, pick: Pick) -> Figure:
    if name is None:
        title = f"Validation metric against {_WORDS[key]}"
        return Figure(f"metric-{key}", title, "", missing="Nothing was validated in this run.")
    series = []
    for color, run in _colored(runs):
        series += _validation(run, name, pick(numbers.progress(run)), _name(runs, run, name), color)
    better = "lower" if numbers.lower_is_better(runs, name) else "higher"
    title = f"{name} against {_WORDS[key]}"
    caption = f"On the validation set; {better} is better." if key == "step" else ""
    ends = [0.0, *(x for run in runs for x in pick(numbers.progress(run)))]
    marks = _marks(runs, pick)
    return _lines(f"metric-{key}", title, caption, axis, Axis(name, zero=True), series, marks, ends=ends)


def _validation(run: Run, name: str, places: Sequence[float], label: str, color: str) -> list[Series]:
    epochs, values = numbers.validated(run, name)
    known = [(x, y) for x, y in zip(numbers.at_epoch_ends(run, places, epochs), values, strict=True) if x is not None]
    return [Series(label, [x for x, _ in known], [y for _, y in known], color, "points")] if known else []


# --- selection


def selection(runs: Sequence[Run]) -> Iterator[Figure]:
    marks = _marks(runs)
    yield _lines(
        "sparsity",
        "Sparsity of the update",
        "Fraction of the averaged gradient that is zero; 0 while steps are dense.",
        Axis("step"),
        Axis("sparsity", "share", zero=True),
        [*_per_run(runs, "sparsity", lambda step: step.reduce.sparsity if step.reduce else None)],
        marks,
    )
    yield _counts(runs)
    yield _thresholds(runs)
    yield _lines(
        "residual",
        "Still owed",
        "Norm of the residual on rank 0: gradient that was computed but not yet sent. It should level off.",
        Axis("step"),
        Axis("norm of the residual", zero=True),
        [*_per_run(runs, "residual", lambda step: step.reduce.residual_norm if step.reduce else None)],
        marks,
    )
    yield _lines(
        "imbalance",
        "Balance of the regions",
        "Largest block that a rank owns over the mean block, on sparse steps; 1 is perfectly even.",
        Axis("step"),
        Axis("largest / mean", include=(1.0, 1.25)),
        [*_per_run(runs, "imbalance", _of_reduction("imbalance"), numbers.is_sparse)],
    )
    yield _kinds(runs)


def _counts(runs: Sequence[Run]) -> Figure:
    series = [
        *_per_run(runs, "put forward by rank 0", _over_k("selected_local"), numbers.is_sparse, "dashed", second=1),
        *_per_run(runs, "in the global update", _over_k("selected_global"), numbers.is_sparse),
    ]
    series += _level(series, 1.0, "k")
    caption = "Entries chosen, as a multiple of k = density x length, on sparse steps."
    axis = Axis("multiple of k", include=(0.8, 1.2))
    return _lines("counts", "Chosen entries against k", caption, Axis("step"), axis, series)


def _thresholds(runs: Sequence[Run]) -> Figure:
    series = [
        *_per_run(runs, "local", _of_reduction("threshold_local"), numbers.is_sparse, "dashed", second=1),
        *_per_run(runs, "global", _of_reduction("threshold_global"), numbers.is_sparse),
    ]
    series = [one for one in series if any(y > 0 for y in one.y)]
    caption = "Smallest magnitude that is put forward (local) and that survives the sum over ranks (global)."
    return _lines(
        "thresholds",
        "Thresholds",
        caption,
        Axis("step"),
        Axis("magnitude", log=True),
        series,
        missing="This algorithm used no thresholds, or no step was sparse.",
    )


def _kinds(runs: Sequence[Run]) -> Figure:
    title, caption = (
        "Density by kind of parameter",
        "Mean fraction of entries that were sent, on the last step analysed.",
    )
    found = [(color, run, last) for color, run in _colored(runs) if (last := last_density(run))]
    if not found:
        return Figure("kinds", title, caption, missing=ANALYZE)
    kinds: dict[str, list[tuple[str, float, str]]] = {}
    for color, run, last in found:
        for kind, values in _by_kind(last).items():
            kinds.setdefault(kind, []).append((run.name, fmean(values), color))
    bars = [
        Bar("" if n else kind, [(name, value, color)], f"{100 * value:.2f} %" if len(runs) == 1 else "")
        for kind, rows in kinds.items()
        for n, (name, value, color) in enumerate(rows)
    ]
    return Figure("kinds", title, caption, draw_bars(bars, Axis("density", "share")))


_KINDS = [
    ("bias", ("bias",)),
    ("normalisation", ("norm", "bn", "batchnorm")),
    ("recurrent", ("lstm", "rnn", "gru", "weight_ih", "weight_hh")),
    ("embedding", ("embed",)),
    ("attention", ("attention", "attn", "query")),
    ("convolution", ("conv", "features", "lookahead")),
]


def kind_of(parameter: str) -> str:
    """The sort of layer a parameter's name speaks of."""
    words = parameter.lower()
    return next((kind for kind, signs in _KINDS if any(sign in words for sign in signs)), "linear and other")


def _by_kind(density: dict[str, float]) -> dict[str, list[float]]:
    kinds: dict[str, list[float]] = {}
    for name, value in density.items():
        kinds.setdefault(kind_of(name), []).append(value)
    return dict(sorted(kinds.items(), key=lambda item: -fmean(item[1])))


def last_density(run: Run) -> dict[str, float]:
    found = [analysis.density_by_parameter for analysis in run.analyses if analysis.density_by_parameter]
    return dict(found[-1]) if found else {}


# --- traffic


def traffic(runs: Sequence[Run]) -> Iterator[Figure]:
    yield _bounds(runs)
    yield _spent(runs)
    for run in runs:
        yield _messages(runs, run)


def _bounds(runs: Sequence[Run]) -> Figure:
    series = [*_per_run(runs, "received", _of_reduction("bytes_received"))]
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
    return _lines(
        "bounds",
        "Bytes against the bounds",
        caption,
        Axis("step"),
        Axis("received per step", "bytes", log=True),
        series,
        _marks(runs),
    )


def _bound(factor: int, world: int) -> Callable[[Step], float | None]:
    return lambda step: factor * step.reduce.k * (world - 1) / world * WORD if step.reduce else None


def _spent(runs: Sequence[Run]) -> Figure:
    series = []
    for color, run in _colored(runs):
        if run.steps:
            x, y = numbers.thin([float(step.step) for step in run.steps], numbers.progress(run).sent)
            series.append(Series(_name(runs, run, "sent"), x, y, color))
    if runs[0].steps:
        would = accumulate(float(step.reduce.dense_bytes) if step.reduce else 0.0 for step in runs[0].steps)
        x, y = numbers.thin([float(step.step) for step in runs[0].steps], list(would))
        series.append(Series("all dense would send", x, y, "muted", "reference"))
    caption = "Total sent by rank 0 since the beginning, and what plain all-reduce would have sent."
    return _lines(
        "spent", "Traffic so far", caption, Axis("step"), Axis("sent", "bytes", zero=True), series, _marks(runs)
    )


def _messages(runs: Sequence[Run], run: Run) -> Figure:
    figure_id = _figure_id(runs, run, "messages")
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
    return Figure(figure_id, title, caption, draw_histogram(x, y, edges[first:], columns), y_label="messages")


def _sizes(run: Run) -> dict[str, dict[int, int]]:
    merged = merge_sizes(record.message_sizes for record in numbers.reductions(run))
    return {operation: sizes for operation, sizes in merged.items() if any(sizes)}


def _binned(counts: dict[int, int], bins: int) -> list[float]:
    found = [0.0] * bins
    for size, count in counts.items():
        if size > 0:
            found[min(bins - 1, size.bit_length() - 1)] += count
    return found


# --- time and memory


def resources(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        yield _phases(runs, run)
    yield _mean_phases(runs)
    yield _lines(
        "memory",
        "Memory",
        "Peak resident memory of rank 0 so far.",
        Axis("step"),
        Axis("peak memory", "bytes", zero=True),
        [*_per_run(runs, "peak memory", lambda step: step.memory_bytes)],
    )


def _phases(runs: Sequence[Run], run: Run) -> Figure:
    figure_id = _figure_id(runs, run, "phases")
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
    drawing = draw_stack(Axis("step"), Axis("per step", "seconds"), series, _marks([run]))
    tops = [sum(values) for values in zip(*(one.y for one in series), strict=True)]
    return Figure(figure_id, title, caption, drawing, y_label=y_title(Axis("per step", "seconds", zero=True), tops))


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


def _mean_bar(runs: Sequence[Run], run: Run, phase: str, timed: Sequence[Step]) -> Bar:
    seconds = [numbers.phase_seconds(step) for step in timed]
    parts = [(name, fmean(one.get(name, 0.0) for one in seconds), _phase_color(name)) for name in numbers.STEP_PHASES]
    shown = [part for part in parts if part[1] > 0]
    label = f"{phase} steps" if len(runs) == 1 else f"{run.name}, {phase}"
    return Bar(label, shown, f"{len(timed)} steps")


def _phase_color(phase: str) -> str:
    return f"p{numbers.STEP_PHASES.index(phase)}" if phase in numbers.STEP_PHASES else "muted"


# --- analysis


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
    figure_id = _figure_id(runs, run, "histogram")
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
    return Figure(
        figure_id,
        title,
        caption,
        draw_histogram(x, Axis("entries", log=True, include=(1.0,)), edges, columns),
        y_label="entries",
    )


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
    for color, run in _colored(runs):
        for slot, (name, value) in enumerate(values):
            known = [(float(one.step), found) for one in run.analyses if (found := value(one)) is not None]
            if known:
                shade = f"c{slot}" if len(runs) == 1 else color
                x, y = numbers.thin([x for x, _ in known], [y for _, y in known])
                style: Style = "dashed" if slot and len(runs) > 1 else "points"
                series.append(Series(_name(runs, run, name, len(values) > 1), x, y, shade, style))
    return _lines(figure_id, title, caption, Axis("step"), axis, series, _marks(runs), missing=ANALYZE)


# --- shared


def _lines(
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
    inside_range = [marker for marker in markers if min(places) <= marker.x <= max(places)]
    drawing = draw_lines(Chart(x, y, series, inside_range, x_scale=tight(places)))
    return Figure(figure_id, title, caption, drawing, y_label=y_title(y, [v for one in series for v in one.y]))


def _per_run(
    runs: Sequence[Run],
    name: str,
    value: Callable[[Step], float | None],
    keep: Callable[[Step], bool] = bool,
    style: Style = "line",
    second: int = 0,
) -> Iterator[Series]:
    for color, run in _colored(runs):
        x, y = numbers.points(run, value, keep)
        if x:
            alone = len(runs) == 1
            word = name if alone else f"{run.name}, {name}" if style == "dashed" else run.name
            yield Series(word, x, y, f"c{second}" if alone else color, "line" if alone else style)


def _of_reduction(name: str) -> Callable[[Step], float | None]:
    return lambda step: float(getattr(step.reduce, name)) if step.reduce else None


def _over_k(name: str) -> Callable[[Step], float | None]:
    return lambda step: getattr(step.reduce, name) / step.reduce.k if step.reduce and step.reduce.k else None


def _level(series: Sequence[Series], height: float, name: str) -> list[Series]:
    ends = [x for one in series for x in one.x]
    return [Series(name, [min(ends), max(ends)], [height, height], "muted", "reference")] if ends else []


def _marks(runs: Sequence[Run], pick: Pick = _AXES[0][2]) -> list[Marker]:
    """Where dense steps turn into sparse ones: one line if all runs agree."""
    found: dict[float, str] = {}
    for color, run in _colored(runs):
        position = numbers.switch(run)
        if position is not None:
            place = pick(numbers.progress(run))[position]
            found[place] = "muted" if place in found or len(runs) == 1 else color
    return [Marker(x, "dense → sparse" if n == 0 else "", color) for n, (x, color) in enumerate(found.items())]


def _colored(runs: Sequence[Run]) -> Iterator[tuple[str, Run]]:
    for slot, run in enumerate(runs):
        yield f"c{slot % COLORS}", run


def _name(runs: Sequence[Run], run: Run, what: str, always: bool = False) -> str:
    if len(runs) == 1:
        return what
    return f"{run.name}, {what}" if always else run.name


def _figure_id(runs: Sequence[Run], run: Run, what: str) -> str:
    return what if len(runs) == 1 else f"{what}-{list(runs).index(run)}"
