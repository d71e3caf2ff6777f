"""The figures of docs/original-run.md: from what is kept of the run beside it, and from runs of its next steps.

Prints the numbers of its table, and draws its pictures.

python docs/figures/original_run.py [RUNS]
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from oktopk.plotting.bars import Bar, draw_histogram, draw_labelled_bars
from oktopk.plotting.drawing import Drawing, write_svg
from oktopk.plotting.frame import Axis, Frame, Marker
from oktopk.plotting.lines import Chart, Series, draw_lines
from oktopk.report.figures.selection import kind_of

DOCS = Path(__file__).parent.parent
KEPT, IMAGES = DOCS / "original-run", DOCS / "img"
SMOOTH, LONG = 10, 100  # steps that a line of a sweep is the mean of, if the run has so many
WIDE = Frame(560, 320)
SIGMAS = {1.5: 0.1336, 2.0: 0.0455, 2.5: 0.0124, 3.0: 0.0027}  # share of a normal law beyond so many deviations

Row = dict[str, Any]


def main(runs: Path) -> None:
    tell(rows(KEPT / "steps.jsonl.gz"), rows(KEPT / "epochs.jsonl.gz"))
    draw("loss", "The original experiment: mean loss of 8 ranks, step by step", original_loss())
    sweeps = {
        "compare": ("Algorithms", [f"next-{name}" for name in ("dense", "topka", "gtopk", "oktopk")]),
        "rates": ("Learning rates", ["rate-oktopk-lr0.001", "next-oktopk", "rate-oktopk-lr0.01"]),
        "densities": ("Densities", ["next-oktopk", "density-oktopk-density0.05", "density-oktopk-density0.10"]),
        "gaussiank": ("gaussiank", [f"sigma-gaussiank-density{density:g}" for density in SIGMAS.values()]),
        "forty": ("The large network", [f"forty-{name}" for name in ("dense", "topka", "gtopk", "oktopk")]),
    }
    for name, (title, names) in sweeps.items():
        there = [run for run in names if (runs / run).is_dir()]
        if len(there) > 1:
            each = SMOOTH if len(rows(runs / there[0] / "steps.jsonl")) >= LONG else 1
            mean = f", mean of {each} steps" if each > 1 else ""
            draw(name, f"{title}: training loss{mean}", losses(runs, there, each))
        for run in there:
            tell_end(runs / run)
    if (runs / "look").is_dir():
        looks = rows(runs / "look" / "analysis.jsonl")
        before, after = switch(runs / "look", looks)
        draw("before", f"Magnitudes at step {before['step']}, before the switch", magnitudes(before))
        draw("after", f"Magnitudes at step {after['step']}, after the switch", magnitudes(after))
        draw("kinds", "Share of entries sent, by kind of parameter, last step analysed", kinds(looks[-1]))
        sparse = [look for look in looks if look["step"] >= after["step"]]
        draw("sigma", "Entries beyond so many standard deviations", sigma(sparse))
        draw("overlap", "Overlap with the true top k", overlap(sparse))
    if (runs / "thirty").is_dir():
        tell_end(runs / "thirty")
        draw(
            "thirty", "Thirty epochs, stopped and resumed: error rates", errors({"": runs / "thirty" / "epochs.jsonl"})
        )
    kept = {name: KEPT / f"large-{name}-epochs.jsonl.gz" for name in ("updates", "gradients")}
    recipes = {name: path for name, path in kept.items() if path.is_file()}
    draw("recipe", "The large network with another recipe: error rates", errors(recipes))


def draw(name: str, title: str, drawing: Drawing) -> None:
    write_svg(IMAGES / f"original-{name}.svg", title, drawing)


def rows(path: Path) -> list[Row]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def tell(steps: Sequence[Row], epochs: Sequence[Row]) -> None:
    for phase in ("dense", "sparse"):
        own = [step for step in steps if step["reduce"]["phase"] == phase]
        print(f"{phase}: {len(own)} steps, the first is {own[0]['step']}")
        for name in ("sparsity", "compression_ratio", "bytes_sent", "inside_bytes", "selected_global"):
            print(f"  {name} {fmean(step['reduce'][name] for step in own):.6g}")
        for name in own[0]["seconds"]:
            print(f"  {name} {1e3 * median(step['seconds'][name] for step in own):.1f} ms")
    for epoch in epochs:
        print(f"epoch {epoch['epoch']}: loss {epoch['train_loss']:.2f}, {epoch.get('validation', '')}")
    last = [after["wall_seconds"] - before["wall_seconds"] for before, after in pairwise(steps[84:])]
    print(f"the last {len(last)} steps: {median(last):.1f} s each")
    print(f"{steps[-1]['wall_seconds'] / 60:.1f} minutes, {max(step['memory_bytes'] for step in steps) / 1e9:.2f} GB")


def tell_end(run: Path) -> None:
    """How a run of the next steps ended, and what its steps sent."""
    steps, last = rows(run / "steps.jsonl"), rows(run / "epochs.jsonl")[-1]
    sparse = [step["reduce"]["bytes_sent"] for step in steps if step["reduce"]["phase"] == "sparse"]
    sent = fmean(sparse) / 1e6 if sparse else 0.0
    loss = fmean(step["loss"] for step in steps[-SMOOTH:])
    wall = median(b["wall_seconds"] - a["wall_seconds"] for a, b in pairwise(steps))
    print(f"{run.name}: {len(steps)} steps of {wall:.2f} s, {sent:.3f} MB")
    print(f"  loss {loss:.3f}, {last.get('validation', '')}")


def original_loss() -> Drawing:
    steps = rows(KEPT / "steps.jsonl.gz")
    losses = Series("loss", [step["step"] for step in steps], [step["loss"] for step in steps], "c0")
    first = next(step["step"] for step in steps if step["reduce"]["phase"] == "sparse")
    y = Axis("loss per character", log=True)
    return draw_lines(Chart(Axis("step"), y, [losses], [Marker(first, "sparse")], frame=WIDE))


def losses(runs: Path, names: Sequence[str], each: int) -> Drawing:
    named = {name.split("-", 1)[1]: rows(runs / name / "steps.jsonl") for name in names}
    shown = [smooth(steps, name, f"c{n}", each) for n, (name, steps) in enumerate(named.items())]
    marks = [Marker(row["step"], "sparse") for row in list(named.values())[-1] if row["reduce"]["phase"] == "sparse"]
    return draw_lines(Chart(Axis("step"), Axis("loss per character", log=each == 1), shown, marks[:1], frame=WIDE))


def smooth(steps: Sequence[Row], name: str, color: str, each: int) -> Series:
    groups = [steps[n : n + each] for n in range(each, len(steps), each)]  # the first steps are off the chart
    return Series(name, [g[-1]["step"] for g in groups], [fmean(row["loss"] for row in g) for g in groups], color)


def switch(run: Path, looks: Sequence[Row]) -> tuple[Row, Row]:
    """The last analysis of a dense step, and the first of a sparse one."""
    sparse = {row["step"] for row in rows(run / "steps.jsonl") if row["reduce"]["phase"] == "sparse"}
    return [one for one in looks if one["step"] not in sparse][-1], next(o for o in looks if o["step"] in sparse)


def magnitudes(look: Row) -> Drawing:
    edges, counts = look["histogram_before"]["edges"], look["histogram_before"]["counts"]
    columns = [
        Series("gradient and residual of rank 0", edges[1:], counts, "c0", "area"),
        Series("sent", edges[1:], look["histogram_after"]["counts"], "c2", "area"),
    ]
    return draw_histogram(Axis("magnitude", log=True), Axis("entries", zero=True), edges, columns)


def kinds(look: Row) -> Drawing:
    by_kind: dict[str, list[float]] = {}
    for name, share in look["density_by_parameter"].items():
        by_kind.setdefault(kind_of(name), []).append(share)
    means = sorted(((fmean(shares), kind) for kind, shares in by_kind.items()), reverse=True)
    bars = [Bar(kind, [("sent", share, "c2")], f"{share:.2%}") for share, kind in means]
    return draw_labelled_bars(bars, Axis("share of entries", "share"))


def overlap(sparse: Sequence[Row]) -> Drawing:
    x = [look["step"] for look in sparse]
    shown = [
        Series("by energy", x, [look["overlap_energy"] for look in sparse], "c2", "points"),
        Series("by count", x, [look["overlap_count"] for look in sparse], "c0", "points"),
    ]
    return draw_lines(Chart(Axis("step"), Axis("overlap", "share", include=(0.0, 1.0)), shown, frame=WIDE))


def sigma(looks: Sequence[Row]) -> Drawing:
    bars = []
    for deviations, normal in SIGMAS.items():
        share = fmean(beyond(look["histogram_before"], deviations) for look in looks)
        bars.append(Bar(f"{deviations} deviations", [("beyond", share, "c2")], f"{share:.2%}, normal {normal:.2%}"))
    return draw_labelled_bars(bars, Axis("share of entries", "share"))


def beyond(histogram: Row, deviations: float) -> float:
    """Share of entries whose magnitude exceeds so many standard deviations, as far as bins of a third tell."""
    edges, counts = histogram["edges"], histogram["counts"]
    middles = [(low * high) ** 0.5 for low, high in pairwise(edges)]
    total = sum(counts)
    limit = deviations * (sum(n * middle**2 for n, middle in zip(counts, middles, strict=True)) / total) ** 0.5
    parts = (
        n * min(1.0, max(0.0, (high - limit) / (high - low)))
        for n, (low, high) in zip(counts, pairwise(edges), strict=True)
    )
    return sum(parts) / total


def errors(runs: Mapping[str, Path]) -> Drawing:
    """Word and character error rates from epochs of runs, by what is said of each."""
    shown, colors = [], iter(("c0", "c1", "c2", "c3"))
    for said, path in runs.items():
        epochs = [row for row in rows(path) if row.get("validation")]
        for name in ("WER", "CER"):
            y = [row["validation"][name] for row in epochs]
            shown.append(Series(f"{name} {said}".strip(), [row["epoch"] for row in epochs], y, next(colors), "points"))
    return draw_lines(Chart(Axis("epoch"), Axis("error rate", "share", zero=True), shown, frame=WIDE))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
