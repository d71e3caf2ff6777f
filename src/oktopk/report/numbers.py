"""What runs say in numbers: totals for cards and tables, points for lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

from oktopk.metrics import PHASES, StepRecord
from oktopk.report.runs import Run, StepLine

LOOP_PHASES = ("turn", "data", "forward", "backward", "wait", "optimizer")
WORD = 4  # bytes
_HIGHER_IS_BETTER = ("acc", "top", "f1")

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Progress:
    """Three ways to count how far a run is, one entry per step."""

    step: Sequence[float]
    wall: Sequence[float]
    sent: Sequence[float]  # bytes, by rank 0


@dataclass(frozen=True)
class Totals:
    """A run in a few numbers; None where it has none."""

    steps: int
    dense_steps: int
    sparse_steps: int
    loss: float | None
    first_loss: float | None
    metric: str | None
    lower_is_better: bool
    best: float | None
    best_epoch: int | None
    last: float | None
    sent: float | None  # bytes
    dense_bytes: float | None  # what a dense run of as many steps would have sent
    sparse_sent_per_step: float | None
    inside_per_step: float | None  # bytes to ranks of the same host, besides; None if there were none
    dense_sent_per_step: float | None
    sparsity: float | None  # mean over sparse steps
    ratio: float | None
    wall: float | None
    step_seconds: float | None
    communication_seconds: float | None  # per step, on the communication thread
    hidden: float | None  # fraction of it that the loop did not wait for
    exposed_by: str | None  # why nothing could be sent before backward was over
    memory: float | None
    gpu_peak: float | None  # these two only where a GPU was used
    gpu_reserved: float | None

    @property
    def saving(self) -> float | None:
        """How many times less was sent than by a dense run of as many steps."""
        return self.dense_bytes / self.sent if self.dense_bytes and self.sent else None


def totals(run: Run) -> Totals:
    records = reductions(run)
    sparse = [record for record in records if record.phase == "sparse"]
    losses = [step.loss for step in run.steps if step.loss is not None]
    epoch_losses = [epoch.train_loss for epoch in run.epochs if epoch.train_loss is not None]
    name, best, best_epoch, last = _metric(run)
    walls = [step.wall_seconds for step in run.steps] + [epoch.wall_seconds for epoch in run.epochs]
    return Totals(
        steps=len(run.steps),
        dense_steps=len(records) - len(sparse),
        sparse_steps=len(sparse),
        loss=epoch_losses[-1] if epoch_losses else _mean(losses[-10:]),
        first_loss=losses[0] if losses else None,
        metric=name,
        lower_is_better=name is None or lower_is_better([run], name),
        best=best,
        best_epoch=best_epoch,
        last=last,
        sent=float(sum(record.bytes_sent for record in records)) if records else None,
        dense_bytes=float(sum(record.dense_bytes for record in records)) if records else None,
        sparse_sent_per_step=_mean([record.bytes_sent for record in sparse]),
        inside_per_step=_mean([record.inside_bytes for record in sparse if record.inside_bytes]),
        dense_sent_per_step=_mean([record.dense_bytes for record in records]),
        sparsity=_mean([record.sparsity for record in sparse]),
        ratio=_mean([record.compression_ratio for record in sparse]),
        wall=max((wall for wall in walls if wall is not None), default=None),
        step_seconds=_mean([sum(loop_seconds(step).values()) for step in run.steps if step.seconds]),
        communication_seconds=_mean([sum(communication_seconds(step).values()) for step in run.steps if step.reduce]),
        hidden=hidden(run.steps),
        exposed_by=_exposed_by(run),
        memory=_most(run, lambda step: step.memory_bytes),
        gpu_peak=_most(run, lambda step: step.gpu_peak_bytes),
        gpu_reserved=_most(run, lambda step: step.gpu_reserved_bytes),
    )


@dataclass(frozen=True)
class Part:
    """Some steps of a run that sent in the same way."""

    name: str
    steps: int
    sent: float  # bytes, by rank 0


def parts(run: Run) -> list[Part]:
    """Where a run's bytes went, in the order of time; parts without a step are left out."""
    records = reductions(run)
    sparse = [n for n, record in enumerate(records) if record.phase == "sparse"]
    if not sparse:
        return [_part("dense steps", records)] if records else []
    start, later = records[: sparse[0]], [r for r in records[sparse[0] :] if r.phase == "dense"]
    # One dense step at the very end is the mean of what ranks still owe; any other was dense by choice, as of auto.
    is_final = len(later) == 1 and sparse[-1] == len(records) - 2
    final = float(sum(record.final_bytes for record in records))  # what shared its step with a sparse reduction
    steps = _part("sparse steps", [records[n] for n in sparse])
    found = [
        _part("dense start", start),
        replace(steps, sent=steps.sent - final),
        Part("final mean", int(final > 0), final),
        _part("final mean" if is_final else "later dense steps", later),
    ]
    return [part for part in found if part.steps]


def _part(name: str, records: Sequence[StepRecord]) -> Part:
    return Part(name, len(records), float(sum(record.bytes_sent for record in records)))


def reductions(run: Run) -> list[StepRecord]:
    return [step.reduce for step in run.steps if step.reduce is not None]


def progress(run: Run) -> Progress:
    sent = accumulate(step.reduce.bytes_sent if step.reduce else 0 for step in run.steps)
    wall = accumulate((step.wall_seconds or 0.0 for step in run.steps), max)
    return Progress([step.step for step in run.steps], list(wall), [float(total) for total in sent])


def switch(run: Run) -> int | None:
    """The position in `run.steps` where dense steps turn into sparse ones, or None if they never do."""
    for position, (before, after) in enumerate(pairwise(run.steps)):
        if _phase(before) == "dense" and _phase(after) == "sparse":
            return position + 1
    return None


def world_size(run: Run) -> int | None:
    """As configured, or from what a dense all-reduce would have sent: 2n(P-1)/P words."""
    configured = run.setting("world_size", "workers")
    if isinstance(configured, int) and configured > 0:
        return configured
    for record in reductions(run):
        share = record.dense_bytes / (2 * record.numel * WORD) if record.numel else 0.0
        if 0.0 < share < 0.999:
            return round(1 / (1 - share))
    return None


def validated(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Epochs that measured `name` on the validation set, and what they found."""
    pairs = [(epoch.epoch, epoch.validation[name]) for epoch in run.epochs if name in epoch.validation]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def metric_name(run: Run) -> str | None:
    """The number the workload is judged by: named in the summary or configuration, else the first that is no loss."""
    names = [name for epoch in run.epochs for name in epoch.validation if name != "loss"]
    chosen = run.summary.get("metric") or run.setting("metric")
    return chosen if chosen in names else (names[0] if names else None)


def lower_is_better(runs: Sequence[Run], name: str) -> bool:
    """As the runs say; for runs that do not say, by its name."""
    said = next((found for run in runs if isinstance(found := run.setting("lower_is_better"), bool)), None)
    return said if said is not None else not any(word in name.lower() for word in _HIGHER_IS_BETTER)


def at_epoch_ends(run: Run, xs: Sequence[float], epochs: Sequence[int]) -> list[float | None]:
    """The entry of `xs` that belongs to the last step of each epoch, or None when it has no step."""
    last = {step.epoch: position for position, step in enumerate(run.steps)}
    return [xs[last[epoch]] if epoch in last else None for epoch in epochs]


def thin(x: Sequence[float], y: Sequence[float], most: int = 240) -> Points:
    """At most `most` points: means over equal shares of the points."""
    if len(x) <= most:
        return list(x), list(y)
    cuts = [round(n * len(x) / most) for n in range(most + 1)]
    spans = [slice(a, b) for a, b in pairwise(cuts)]
    return [fmean(x[span]) for span in spans], [fmean(y[span]) for span in spans]


def smooth(y: Sequence[float]) -> list[float]:
    """The median over a window of about a thirtieth of the points, centred where there is room."""
    reach = max(1, len(y) // 60)
    return [median(y[max(0, n - reach) : n + reach + 1]) for n in range(len(y))]


def points(run: Run, value: Callable[[StepLine], float | None], keep: Callable[[StepLine], bool] = bool) -> Points:
    """Step numbers and values, where there is a value, thinned."""
    pairs = [(float(step.step), value(step)) for step in run.steps if keep(step)]
    known = [(x, y) for x, y in pairs if y is not None]
    return thin([x for x, _ in known], [y for _, y in known])


def is_sparse(step: StepLine) -> bool:
    return _phase(step) == "sparse"


def loop_seconds(step: StepLine) -> dict[str, float]:
    """What a step took, phase by phase. Runs that did not record `wait` reduced when backward was over."""
    recorded = {phase: step.seconds[phase] for phase in LOOP_PHASES if phase in step.seconds}
    return recorded if "wait" in recorded else {**recorded, "wait": sum(communication_seconds(step).values())}


def communication_seconds(step: StepLine) -> dict[str, float]:
    """What the communication thread did meanwhile."""
    return {phase: step.reduce.seconds.get(phase, 0.0) for phase in PHASES} if step.reduce else {}


def hidden(steps: Sequence[StepLine]) -> float | None:
    """The fraction of communication that the loop did not wait for; None where nobody recorded it."""
    known = [step for step in steps if step.reduce and "wait" in step.seconds]
    spent = sum(sum(communication_seconds(step).values()) for step in known)
    waited = sum(step.seconds["wait"] for step in known)
    return max(0.0, 1 - waited / spent) if spent else None


def _exposed_by(run: Run) -> str | None:
    if run.setting("norm_clip"):
        return "clipping by norm waits for all gradients"
    parameters, bucket_mb = run.setting("parameters"), run.setting("bucket_mb")
    if parameters and bucket_mb and parameters * WORD <= bucket_mb * 2**20:
        return "all gradients are one bucket, which a smaller --bucket-mb divides"
    return None


def _phase(step: StepLine) -> str | None:
    return step.reduce.phase if step.reduce else None


def _metric(run: Run) -> tuple[str | None, float | None, int | None, float | None]:
    name = metric_name(run)
    if name is None:
        return None, None, None, None
    epochs, values = validated(run, name)
    best = min(values) if lower_is_better([run], name) else max(values)
    return name, best, epochs[values.index(best)], values[-1]


def _most(run: Run, value: Callable[[StepLine], float | None]) -> float | None:
    return max((known for step in run.steps if (known := value(step)) is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
