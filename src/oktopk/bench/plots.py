"""Plots of benchmark runs, as PNG for pages and SVG for print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from oktopk.bench.allreduce import AllreduceResult
from oktopk.bench.step import StepResult
from oktopk.bench.validate import Comparison

OURS, OTHERS, FLOOR = "#0a7a5c", "#8a8f98", "#d5d8dd"
COLORS = {
    "dense": "#8a8f98", "topka": "#c1666b", "topkdsa": "#d4a03a", "gtopk": "#7d6b9e", "gaussiank": "#4f86c6",
    "oktopk": OURS,
}  # fmt: skip


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        # No date inside: the same numbers give the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata=metadata)
    return paths


def step_times(results: Sequence[StepResult], title: str) -> Figure:
    """Bars: the floor, and what synchronisation adds to it."""
    ordered = sorted(results, key=lambda r: -r.step_seconds)
    figure, axes = _figure(7.5, 1.0 + 0.28 * len(ordered))
    names = [result.contender for result in ordered]
    base = [min(result.step_seconds, result.floor_seconds) * 1e3 for result in ordered]
    axes.barh(names, base, color=FLOOR, label="computation (floor)")
    axes.barh(
        names,
        [max(0.0, result.overhead_seconds) * 1e3 for result in ordered],
        left=base,
        color=[OURS if result.contender.startswith("oktopk") else OTHERS for result in ordered],
        label="synchronisation",
    )
    for row, result in enumerate(ordered):
        axes.text(result.step_seconds * 1e3, row, f" {result.step_seconds * 1e3:.0f} ms", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds per step")
    axes.set_title(title)
    return figure


def volume_by_world(results: Sequence[AllreduceResult], title: str) -> Figure:
    """Lines: bytes received per rank as the world grows."""
    figure, axes = _figure(6.5, 4.0)
    for algorithm, color in COLORS.items():
        mine = sorted((r.world_size, r.bytes_received) for r in results if r.algorithm == algorithm)
        if mine:
            axes.plot(*zip(*mine, strict=True), marker="o", color=color, label=algorithm)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="bytes received per rank", title=title)
    sizes = sorted({r.world_size for r in results})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


def volume_against_bounds(results: Sequence[AllreduceResult], title: str) -> Figure:
    """Bars: words over k(P-1)/P, with the lower bound 2 and the bound 6."""
    figure, axes = _figure(7.5, 3.5)
    sparse = [r for r in results if r.algorithm != "dense"]
    labels = [f"{r.algorithm}\n{r.wire}\n{r.density:g}" for r in sparse]
    axes.bar(range(len(sparse)), [r.words_over_k for r in sparse], color=[COLORS[r.algorithm] for r in sparse])
    axes.set_xticks(range(len(sparse)), labels, fontsize=7)
    for bound, text in ((2, "lower bound 2k"), (6, "Ok-Topk's bound 6k")):
        axes.axhline(bound, color="#444444", linewidth=0.8, linestyle="--")
        axes.text(len(sparse) - 0.5, bound, f" {text}", va="bottom", ha="right", fontsize=7)
    axes.set(ylabel="words received / (k (P-1)/P)", title=title)
    return figure


def speedup_lines(
    curves: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, title: str, unit: float = 1.0
) -> Figure:
    """Lines of speed-up over dense; above 1 it pays."""
    figure, axes = _figure(6.5, 4.0)
    for name, points in curves.items():
        axes.plot([x / unit for x, _ in points], [y for _, y in points], label=name)
    axes.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="speed-up over dense", title=title)
    axes.legend(frameon=False, fontsize=8)
    return figure


def predicted_against_measured(comparisons: Mapping[str, Sequence[Comparison]], title: str) -> Figure:
    """Points on the diagonal were predicted exactly; the band is 30%."""
    figure, axes = _figure(5.0, 5.0)
    everything = [c for rows in comparisons.values() for c in rows]
    low = min(min(c.measured, c.predicted) for c in everything) / 1.5
    high = max(max(c.measured, c.predicted) for c in everything) * 1.5
    axes.fill_between([low, high], [low * 0.7, high * 0.7], [low * 1.3, high * 1.3], color=FLOOR, label="within 30%")
    axes.plot([low, high], [low, high], color="#444444", linewidth=0.8)
    for network, rows in comparisons.items():
        axes.scatter([c.measured for c in rows], [c.predicted for c in rows], s=18, label=network)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds", ylabel="predicted seconds", title=title)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.legend(frameon=False)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
