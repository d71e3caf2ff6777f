"""A run as people watch it: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from oktopk.cli.console import bytes_text, console, duration_text, facts
from oktopk.metrics import StepRecord
from oktopk.training.environment import world_rank
from oktopk.training.journal import EpochEntry
from oktopk.training.observer import Observer, Start, Step, Summary

_LINE_SECONDS = 10.0  # between two step lines where there is no bar
_BAR_COLUMNS = 100  # a narrower terminal has room for the numbers only


def make_observer(quiet: bool) -> QuietObserver:
    """The observer for this terminal, or for a file."""
    out = console()
    if quiet or world_rank() != 0:
        return QuietObserver(out)
    return BarObserver(out) if out.is_terminal else LineObserver(out)


class QuietObserver(Observer):
    """Says nothing but how it ended."""

    def __init__(self, out: Console) -> None:
        self.out = out

    def finished(self, summary: Summary) -> None:
        self.out.print(ending(summary), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to put away."""


class LineObserver(QuietObserver):
    """One line per epoch, and one now and then in between. Each carries rank and step."""

    def __init__(self, out: Console) -> None:
        super().__init__(out)
        self.phase = ""
        self.done = 0
        self._said_at = perf_counter()
        self.saved_bytes = 0
        self._is_preparing = False

    def preparing(self, done: int, total: int) -> None:
        if not self._is_preparing or perf_counter() - self._said_at > _LINE_SECONDS:
            self._is_preparing = True
            self.say(f"preparing data, once: {done} of {total}")

    def started(self, start: Start) -> None:
        self.start, self.done = start, start.step
        self._began, self._began_at = perf_counter(), start.step
        self.say(beginning(start))
        for notice in start.notices:
            self.say(notice)

    def step(self, step: Step) -> None:
        self.done = step.step
        if step.reduce is not None:
            self.saved_bytes += step.reduce.dense_bytes - step.reduce.bytes_sent
            if step.reduce.phase != self.phase:
                self._announce_phase(step, step.reduce)
        if perf_counter() - self._said_at > _LINE_SECONDS:
            self.say(
                f"epoch {step.epoch} step {step.batch}/{self.start.steps_per_epoch} loss {step.loss:.3f} | "
                f"{phase_text(step)} | {self.rate():.2g} steps/s | saved {bytes_text(max(0, self.saved_bytes))} | "
                f"ETA {duration_text(self.remaining())}"
            )

    def epoch(self, entry: EpochEntry) -> None:
        self.say(epoch_text(entry, self.start.metric))

    def finished(self, summary: Summary) -> None:
        self.close()
        self.out.print(facts(summary_row(summary), "summary"))
        if summary.notice:
            self.out.print(f"notice: {summary.notice}", markup=False, soft_wrap=True)
        super().finished(summary)

    def say(self, text: str) -> None:
        """One line for the log."""
        self._said_at = perf_counter()
        self.out.print(Text(f"[rank 0 step {self.done}] ", style="dim") + Text(text), soft_wrap=True)

    def rate(self) -> float:
        """Steps per second since this process began."""
        return (self.done - self._began_at) / max(1e-9, perf_counter() - self._began)

    def remaining(self) -> float:
        """Seconds to go, if it goes on like this."""
        return (self.start.epochs * self.start.steps_per_epoch - self.done) / max(1e-9, self.rate())

    def _announce_phase(self, step: Step, record: StepRecord) -> None:
        if record.phase == "sparse":
            self.say(f"sparse from step {step.step - 1} on: density {record.k / record.numel:.3g}")
        elif self.start.density is not None:
            self.say(f"dense warm-up until step {self.start.warmup_steps}")
        self.phase = record.phase


class BarObserver(LineObserver):
    """A live bar below the lines."""

    def __init__(self, out: Console) -> None:
        super().__init__(out)
        bar = [BarColumn(bar_width=None)] if out.width >= _BAR_COLUMNS else []
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"), *bar, MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} steps/s"), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[phase]}"), TextColumn("saved {task.fields[saved]}"), TextColumn("ETA"),
            TimeRemainingColumn(compact=True), console=out, transient=True, expand=bool(bar),
        )  # fmt: skip

    def started(self, start: Start) -> None:
        super().started(start)
        total = start.epochs * start.steps_per_epoch
        self._task = self._bar.add_task("", total=total, epoch="0", rate="-", loss="-", phase="starting", saved="-")
        self._bar.update(self._task, completed=start.step)
        self._bar.start()

    def step(self, step: Step) -> None:
        self._said_at = perf_counter()  # the bar says it
        super().step(step)
        self._bar.update(
            self._task,
            completed=step.step,
            epoch=f"{step.epoch}/{self.start.epochs}",
            rate=f"{self.rate():.2g}",
            loss=f"{step.loss:.3f}",
            phase=phase_text(step),
            saved=bytes_text(max(0, self.saved_bytes)),
        )

    def validating(self, epoch: int) -> None:
        self._bar.update(self._task, phase="validating")

    def saved(self, path: Path) -> None:
        self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


def beginning(start: Start) -> str:
    workers = f"{start.world_size} worker{'s' if start.world_size > 1 else ''}"
    resumed = f", resumed at step {start.step}" if start.step else ""
    return " | ".join(
        [
            f"{start.workload} {start.preset}, {start.parameters:,} parameters",
            start.algorithm if start.density is None else _sparse_plan(start),
            f"{workers}{_hardware(start)}, {start.epochs} epochs x {start.steps_per_epoch} steps{resumed}",
            str(start.run),
        ]
    )


def _hardware(start: Start) -> str:
    """What a rank computes on, if it is not what one would think."""
    where = "" if start.computed_on == "cpu" else f" on {start.computed_on}"
    return where + ("" if start.precision == "float32" else f" in {start.precision}")


def phase_text(step: Step) -> str:
    if step.reduce is None:
        return "local"
    if step.reduce.phase == "dense":
        return "dense"
    return f"sparse {step.reduce.selected_global / max(1, step.reduce.numel):.3g}"


def epoch_text(entry: EpochEntry, metric: str) -> str:
    """One epoch in words; what has no data is not mentioned."""
    parts = [
        f"epoch {entry.epoch} train loss {entry.train_loss:.2f}"
        if entry.train_loss is not None
        else f"epoch {entry.epoch}"
    ]
    if entry.dense_steps:
        parts.append(f"dense {entry.dense_steps}/{entry.steps} steps, {_sent(entry.sent_per_dense_step)}")
    if entry.sparse_steps and entry.sparsity is not None and entry.compression_ratio is not None:
        parts.append(
            f"sparse {entry.sparse_steps}/{entry.steps} steps, sparsity {entry.sparsity:.3f}, ratio "
            f"{entry.compression_ratio:.1f}, {_sent(entry.sparse_bytes_per_step)} "
            f"(dense {bytes_text(entry.dense_bytes_per_step or 0)})"
        )
    if entry.skipped_steps:
        parts.append(f"{entry.skipped_steps} steps skipped: gradient not finite")
    parts += gpu_text(entry)
    if entry.validation:
        parts.append(validation_text(entry.validation, metric))
    return " | ".join([*parts, duration_text(entry.seconds)])


def gpu_text(entry: EpochEntry) -> list[str]:
    """Its memory, where there is one."""
    if entry.gpu_peak_bytes is None:
        return []
    words = {"allocated": entry.gpu_allocated_bytes, "peak": entry.gpu_peak_bytes, "reserved": entry.gpu_reserved_bytes}
    return ["GPU " + ", ".join(f"{bytes_text(count or 0)} {name}" for name, count in words.items())]


def validation_text(validation: Mapping[str, float], metric: str) -> str:
    order = sorted(validation, key=lambda name: (name != metric, name))
    return "validation " + ", ".join(f"{name} {validation[name]:.3f}" for name in order)


def summary_row(summary: Summary) -> dict[str, object]:
    """What there is to say about a run; what has no data is left out."""
    row: dict[str, object] = {"epochs": summary.epochs, "dense steps": summary.dense_steps}
    row["sparse steps"] = summary.sparse_steps
    if summary.local_steps:
        row["steps without sending"] = summary.local_steps
    if summary.train_loss is not None:
        row["train loss"] = summary.train_loss
    row |= {f"validation {name}": value for name, value in (summary.validation or {}).items()}
    if summary.best is not None:
        row[f"best {summary.metric}"] = summary.best
    row |= {"sent": bytes_text(summary.bytes_sent), "dense would send": bytes_text(summary.dense_bytes)}
    for name in ("allocated", "peak", "reserved"):
        count = getattr(summary, f"gpu_{name}_bytes")
        row |= {} if count is None else {f"GPU memory {name}": bytes_text(count)}
    return row | {"time": duration_text(summary.wall_seconds)}


def ending(summary: Summary) -> str:
    how = f"stopped by {summary.stopped_by} after" if summary.stopped_by else "done:"
    resume = (
        f"; continue with oktopk train --resume {summary.run}" if (summary.stopped_by or "").startswith("SIG") else ""
    )
    return f"{how} {summary.steps} steps in {duration_text(summary.wall_seconds)}: {summary.run}{resume}"


def _sparse_plan(start: Start) -> str:
    return f"{start.algorithm} at density {start.density:g} after {start.warmup_steps} dense steps"


def _sent(count: float | None) -> str:
    return f"sent {bytes_text(count or 0)}/step"
