"""What rank 0 writes down: steps, epochs, the summary, and scalars for trackers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from oktopk.training.analysis import Analysis
from oktopk.training.checkpoint import Position
from oktopk.training.config import TrainConfig
from oktopk.training.devices import GpuMemory
from oktopk.training.journal import EpochEntry, Journal, StepEntry, summarize_epoch
from oktopk.training.observer import Summary
from oktopk.training.run_directory import ANALYSIS, EPOCHS, STEPS, RunDirectory
from oktopk.training.trackers import Tracker, make_trackers
from oktopk.training.world import World
from oktopk.workloads.base import Metric

T = TypeVar("T")
_TRACKED = ("sparsity", "compression_ratio", "bytes_sent", "selected_global", "residual_norm")


class Recorder:
    """The records of one run. Every rank calls it; rank 0 writes."""

    def __init__(self, world: World, journal: Journal) -> None:
        self._world, self._journal = world, journal
        self._trackers: list[Tracker] = []
        self._entries: list[StepEntry] = []  # of the epoch under way
        self._steps = self._sparse_steps = self._local_steps = self._bytes_sent = self._dense_bytes = 0
        self._train_loss: float | None = None
        self._validation: Mapping[str, float] | None = None
        self._gpu = GpuMemory()

    def open(self, config: TrainConfig, directory: RunDirectory, at: Position) -> None:
        """Begin, or continue after what a resumed run had written until its checkpoint."""
        self._directory = directory
        if config.resume:
            self._as_first(lambda: self._recall(at))
        self._trackers = self._as_first(lambda: make_trackers(config, directory, at.step)) or []

    def drain(self) -> None:
        """Write the steps since the last call."""
        entries = self._journal.drain(self._world)
        self._count(entries)
        self._entries += entries
        self._as_first(lambda: self._directory.append_steps([entry.to_json() for entry in entries]))
        for entry in entries:
            self._track({"train/loss": entry.loss, "train/lr": entry.lr, **entry.gpu.known()}, entry.step)
            if entry.reduce is not None:
                self._track({f"reduce/{name}": getattr(entry.reduce, name) for name in _TRACKED}, entry.step)

    def end_epoch(self, at: Position) -> EpochEntry:
        """The numbers of the epoch under way."""
        entry = summarize_epoch(at.epoch, self._entries, at.epoch_seconds, at.wall_seconds)
        self._entries = []
        return entry

    def write_epoch(self, entry: EpochEntry, step: int) -> None:
        self._train_loss = entry.train_loss
        self._validation = entry.validation or self._validation
        self._as_first(lambda: self._directory.append(EPOCHS, [entry.to_json()]))
        self._track({"epoch/train_loss": entry.train_loss, "epoch/sparsity": entry.sparsity}, step)
        self._track({f"validation/{name}": value for name, value in (entry.validation or {}).items()}, step)

    def write_analysis(self, analysis: Analysis) -> None:
        self._as_first(lambda: self._directory.append(ANALYSIS, [analysis.to_json()]))

    def finish(self, at: Position, metric: Metric, stopped_by: str | None, notice: str | None) -> Summary:
        """Write the summary; every rank gets that of rank 0."""
        summary = Summary(
            run=self._directory.path, steps=self._steps, epochs=at.epoch, wall_seconds=at.wall_seconds,
            dense_steps=self._steps - self._sparse_steps - self._local_steps, sparse_steps=self._sparse_steps,
            local_steps=self._local_steps,
            bytes_sent=self._bytes_sent, dense_bytes=self._dense_bytes, train_loss=self._train_loss,
            validation=self._validation, metric=metric.name, best=at.best, stopped_by=stopped_by, notice=notice,
            **self._gpu.known(),
        )  # fmt: skip
        self._as_first(lambda: self._directory.write_summary(summary.to_json()))
        shared = self._world.announce(summary.to_json())
        return Summary(
            **{"train_loss": None, "validation": None, "best": None, "stopped_by": None, "notice": None}
            | shared
            | {"run": Path(shared["run"])}
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Steps, and how many of them were sparse."""
        return self._steps, self._sparse_steps

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _as_first(self, action: Callable[[], T]) -> T | None:
        """Rank 0 does it; if it cannot (a full disk, a missing package), all ranks stop."""
        return self._world.together(lambda: action() if self._world.is_first else None)

    def _recall(self, at: Position) -> None:
        self._directory.rewind(at.step, at.epoch)
        entries = [StepEntry.from_json(row) for row in self._directory.rows(STEPS)]
        self._count(entries)
        self._entries = [entry for entry in entries if entry.epoch == at.epoch]
        epochs = self._directory.rows(EPOCHS)
        self._train_loss = epochs[-1].get("train_loss") if epochs else None
        self._validation = next((row["validation"] for row in reversed(epochs) if "validation" in row), None)

    def _count(self, entries: list[StepEntry]) -> None:
        records = [entry.reduce for entry in entries if entry.reduce is not None]
        self._steps += len(entries)
        self._gpu = entries[-1].gpu if entries else self._gpu
        self._local_steps += len(entries) - len(records)
        self._sparse_steps += sum(record.phase == "sparse" for record in records)
        self._bytes_sent += sum(record.bytes_sent for record in records)
        # A dense training sends as much in steps in which this one sends nothing.
        per_step = max((record.dense_bytes for record in records), default=self._dense_bytes // max(1, self._steps))
        self._dense_bytes += sum(entry.reduce.dense_bytes if entry.reduce else per_step for entry in entries)

    def _track(self, values: Mapping[str, float | None], step: int) -> None:
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(known, step)
