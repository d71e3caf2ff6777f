"""Which part of the gradient was sent, and what is still owed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from oktopk.plotting.bars import Bar, draw_bars
from oktopk.plotting.frame import Axis
from oktopk.report import numbers
from oktopk.report.figures.base import (
    ANALYZE,
    Figure,
    colored,
    level,
    line_figure,
    of_reduction,
    over_k,
    per_run,
    switch_marks,
)
from oktopk.report.runs import Run


def selection(runs: Sequence[Run]) -> Iterator[Figure]:
    marks = switch_marks(runs)
    yield line_figure(
        "sparsity",
        "Sparsity of the update",
        "Fraction of the averaged gradient that is zero; 0 while steps are dense.",
        Axis("step"),
        Axis("sparsity", "share", zero=True),
        [*per_run(runs, "sparsity", lambda step: step.reduce.sparsity if step.reduce else None)],
        marks,
    )
    yield _counts(runs)
    yield _thresholds(runs)
    yield line_figure(
        "residual",
        "Still owed",
        "Norm of the residual on rank 0: gradient that was computed but not yet sent. It should level off.",
        Axis("step"),
        Axis("norm of the residual", zero=True),
        [*per_run(runs, "residual", lambda step: step.reduce.residual_norm if step.reduce else None)],
        marks,
    )
    yield line_figure(
        "imbalance",
        "Balance of the regions",
        "Largest block that a rank owns over the mean block, on sparse steps; 1 is perfectly even.",
        Axis("step"),
        Axis("largest / mean", include=(1.0, 1.25)),
        [*per_run(runs, "imbalance", of_reduction("imbalance"), numbers.is_sparse)],
    )
    yield _kinds(runs)


def _counts(runs: Sequence[Run]) -> Figure:
    series = [
        *per_run(runs, "put forward by rank 0", over_k("selected_local"), numbers.is_sparse, "dashed", second=1),
        *per_run(runs, "in the global update", over_k("selected_global"), numbers.is_sparse),
    ]
    series += level(series, 1.0, "k")
    caption = "Entries chosen, as a multiple of k = density x length, on sparse steps."
    axis = Axis("multiple of k", include=(0.8, 1.2))
    return line_figure("counts", "Chosen entries against k", caption, Axis("step"), axis, series)


def _thresholds(runs: Sequence[Run]) -> Figure:
    series = [
        *per_run(runs, "local", of_reduction("threshold_local"), numbers.is_sparse, "dashed", second=1),
        *per_run(runs, "global", of_reduction("threshold_global"), numbers.is_sparse),
    ]
    series = [one for one in series if any(y > 0 for y in one.y)]
    caption = "Smallest magnitude that is put forward (local) and that survives the sum over ranks (global)."
    return line_figure(
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
    found = [(color, run, last) for color, run in colored(runs) if (last := last_density(run))]
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
