"""The training loop: forward, backward and reduce at the same time, step; then validate, record and save."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from oktopk.errors import ConfigError, DataError
from oktopk.front_ends.clipping import NormClip
from oktopk.front_ends.local_defaults import worker_hosts
from oktopk.front_ends.memory import HeapGaps, keep_fewer_compiled, return_freed_memory
from oktopk.training.algorithms import has_sparse_steps
from oktopk.training.analysis import Analyzer
from oktopk.training.checkpoint import Checkpoints, Position, find_checkpoint
from oktopk.training.config import TrainConfig
from oktopk.training.devices import allow_determinism, find_place
from oktopk.training.evaluation import validate
from oktopk.training.interrupts import Interrupts
from oktopk.training.journal import Journal, Stopwatch
from oktopk.training.learning_rate import learning_rate
from oktopk.training.observer import Observer, Start, Step, Summary
from oktopk.training.optimizers import make_optimizer
from oktopk.training.randomness import seed_all, seed_rank
from oktopk.training.recorder import Recorder
from oktopk.training.run_directory import RunDirectory, write_json
from oktopk.training.state import State
from oktopk.training.synchronisation import make_synchronisation
from oktopk.training.turns import Turns, find_turns
from oktopk.training.values import as_fields
from oktopk.training.workload import make_workload
from oktopk.training.world import World
from oktopk.transport.base import Transport
from oktopk.workloads.base import Recipe, Workload

EARLY_STOP, STEP_LIMIT = "early stop", "the limit of steps"


def train(config: TrainConfig, world: World, observer: Observer | None = None) -> Summary:
    """Train as configured, with every rank of `world`; what came of it.

    With `config.resume` the run continues from that checkpoint; `resumed_config` gives the configuration it had.
    """
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        allow_determinism()
    keep_fewer_compiled()
    if not config.keep_memory:
        return_freed_memory()
    seed_all(config.seed)
    watcher = observer if observer and world.is_first else Observer()
    workload = world.local_first(lambda: make_workload(config, watcher.preparing))
    trainer = Trainer(config, workload, world, watcher)
    try:
        with Interrupts() as interrupts:
            return trainer.run(interrupts)
    finally:
        trainer.close()


def resumed_config(resume: Path, workload: str | None = None, trust: bool = False) -> TrainConfig:
    """The configuration of a run, set to continue from its last checkpoint (or the checkpoint given).

    A run of a workload that is not the package's names code to import, and the run may be somebody else's: such a name
    is taken from `workload`, or from the run if you `trust` it.
    """
    run = find_checkpoint(resume).parent.parent
    known = {field.name for field in fields(TrainConfig)}
    values = {name: value for name, value in RunDirectory.open(run).config.items() if name in known}
    saved = TrainConfig(**as_fields(TrainConfig, values, str(run / "config.json")))
    if ":" in saved.workload and workload is None and not trust:
        raise ConfigError(
            f"{run} names code to run, the workload {saved.workload!r}. If that is yours, say so: give the workload "
            "too, or --trust to run whatever this run names."
        )
    return replace(saved, workload=workload or saved.workload, resume=resume, runs=run.parent, name=run.name)


class Trainer:
    """One run on one rank."""

    def __init__(self, config: TrainConfig, workload: Workload, world: World, observer: Observer) -> None:
        self.config, self.workload, self.world, self.observer = config, workload, world, observer
        self.place = world.together(lambda: find_place(config.device, world.local_rank, config.precision))
        self.recipe = config.recipe(workload.recipe, self._steppers(config.reduced(workload.recipe)))
        self.turns = find_turns(world.rank) if self.place.device.type == "cpu" else Turns()
        self.model = workload.model().to(self.place.device)
        self.batches_per_epoch = world.together(lambda: workload.steps_per_epoch(world.world_size))
        self.steps_per_epoch = -(-self.batches_per_epoch // config.accumulate)
        self.journal, self.stopwatch = Journal(self.place.memory), Stopwatch()
        self.recorder = Recorder(world, self.journal)
        scaler = self.place.make_scaler()
        optimizer = make_optimizer(self.recipe, self.model.parameters(), fused=scaler is None)
        self.optimizer = make_synchronisation(config, self.recipe, optimizer, self.model, self.journal.sink, scaler)
        self.reducer = self.optimizer.reducer
        self.analyzer = Analyzer(world, self.model)
        self.state = State(self.model, self.optimizer, workload, world, self.batches_per_epoch)
        seed_rank(config.seed, world.rank)
        self.at, self.gaps = Position(), HeapGaps()
        self.stopped_by: str | None = None

    def _steppers(self, reduce: str) -> int:
        """How many step by themselves: workers, or hosts of them."""
        if reduce != "updates":
            return self.world.world_size
        return self.world.count_hosts(worker_hosts(self.config.hosts, self.config.overlap, self.place.device))

    def run(self, interrupts: Interrupts) -> Summary:
        """Train to the end, or to the next checkpoint after a signal."""
        self.directory = self._open_directory()
        self.checkpoints = Checkpoints(self.directory.checkpoints, self.world, self.config.keep)
        if self.config.resume:
            self._resume(self.config.resume)
        self.recorder.open(self.config, self.directory, self.at)
        self._ticked = perf_counter()
        self.observer.started(self._start_event())
        self._heed_step_limit()
        while self.at.epoch < self.recipe.epochs and self.stopped_by is None:
            self._run_epoch(interrupts)
        summary = self.recorder.finish(self.at, self.workload.metric, self.stopped_by, self._notice())
        self.observer.finished(summary)
        return summary

    def close(self) -> None:
        self.optimizer.close()
        self.recorder.close()

    # -- one epoch -----------------------------------------------------------------------------------------------

    def _run_epoch(self, interrupts: Interrupts) -> None:
        self.model.train()
        rank, world_size = self.world.rank, self.world.world_size
        batches = self.world.together(
            lambda: iter(self.workload.batches(self.at.epoch, rank, world_size, start=self.at.batch))
        )
        while self.at.batch < self.batches_per_epoch and self.stopped_by is None:
            received = self._run_step(batches, interrupts)
            if received:
                self.stopped_by = signal.Signals(received).name
                return self._save_inside_epoch()
            self._heed_step_limit()
            if self.at.batch < self.batches_per_epoch and self._is_checkpoint_due():
                self._save_inside_epoch()
        return self._end_epoch() if self.at.batch >= self.batches_per_epoch else None

    def _heed_step_limit(self) -> None:
        if self.config.max_steps is not None and self.at.step >= self.config.max_steps:
            self.stopped_by = STEP_LIMIT

    def _is_checkpoint_due(self) -> bool:
        every = self.config.checkpoint_every
        return self.stopped_by is not None or (every > 0 and self.at.step % every == 0)

    def _save_inside_epoch(self) -> None:
        self._write_steps()
        self._save()

    def _write_steps(self) -> None:
        self.optimizer.wait()
        self.recorder.drain()

    def _end_epoch(self) -> None:
        if self.at.epoch + 1 >= self.recipe.epochs:
            self.optimizer.finish()
        self._write_steps()
        if self.recipe.reduce == "gradients":
            # Running statistics of normalisation layers are local; from here on they are everyone's.
            self.world.average_([buffer for buffer in self.model.buffers() if buffer.is_floating_point()])
        self._tick()
        entry = self.recorder.end_epoch(self.at)
        validation, is_best = self._validate() if self._is_validation_due() else (None, False)
        self._tick()
        entry = replace(entry, validation=validation, wall_seconds=self.at.wall_seconds)
        self.recorder.write_epoch(entry, self.at.step)
        self.at = replace(self.at, epoch=self.at.epoch + 1, batch=0, epoch_seconds=0.0)
        self._save(is_best)
        self.observer.epoch(entry)

    # -- one step ------------------------------------------------------------------------------------------------

    def _run_step(self, batches: Iterator[Any], interrupts: Interrupts) -> int:
        """One optimizer step; the signal that some rank received, or 0."""
        micro_batches = min(self.config.accumulate, self.batches_per_epoch - self.at.batch)
        lr = learning_rate(self.recipe, self.at.step, self.steps_per_epoch, self.world.world_size)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.reducer.notify(interrupts.received)
        losses = self._reduce(batches, micro_batches, lr)
        with self.stopwatch.phase("optimizer"):
            self.optimizer.step()
        # Only now: to read a loss is to wait for the device that computes it.
        self._note(sum(float(loss) for loss in losses), lr, micro_batches)
        self.gaps.step()
        return self.optimizer.notified

    def _reduce(self, batches: Iterator[Any], micro_batches: int, lr: float) -> list[Tensor]:
        """Gradients of some batches added up and reduced; the share of each in their mean loss on this rank."""
        self.optimizer.zero_grad()
        if self.config.analyze_every > 0 and self.at.step % self.config.analyze_every == 0:
            return self._reduce_analyzed(batches, micro_batches, lr)
        try:
            losses = self._accumulate(batches, micro_batches)
        except Exception as error:
            self._end_together(error)
        with self.stopwatch.phase("wait"):
            self.optimizer.synchronize()
        return losses

    def _end_together(self, error: Exception) -> NoReturn:
        """Raise `error`, and see that the other ranks hear of it where they next meet this one."""

        def fail(_: Transport) -> NoReturn:
            raise error

        if self.optimizer.sends_every_step:
            self.reducer.refuse(error)
        # They may as well come to the end of an epoch first: so they are told in both places.
        self.world.abort(error, self.at.step)
        self.reducer.communicate(fail)

    def _reduce_analyzed(self, batches: Iterator[Any], micro_batches: int, lr: float) -> list[Tensor]:
        """As `_reduce`, but all ranks look at their gradients before anything is sent."""
        with self.optimizer.no_sync():
            losses = self.world.together(lambda: self._accumulate(batches, micro_batches))
        self.analyzer.before(self.reducer.residuals(), self._clip_factor(), lr if self.config.fold_learning_rate else 1)
        with self.stopwatch.phase("wait"):
            self.optimizer.synchronize()
        self.recorder.write_analysis(self.analyzer.after(self.at.step, self.reducer.last_step.k))
        return losses

    def _accumulate(self, batches: Iterator[Any], micro_batches: int) -> list[Tensor]:
        """Gradients of some batches added up; those of the last are sent as they become ready."""
        losses = []
        for left in reversed(range(micro_batches)):
            with self.optimizer.no_sync() if left else nullcontext():
                losses.append(self._backward(batches, micro_batches))
        return losses

    def _backward(self, batches: Iterator[Any], micro_batches: int) -> Tensor:
        with self._turn():
            return self._compute(batches, micro_batches)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This rank's turn to compute, where ranks take turns."""
        with ExitStack() as stack:
            with self.stopwatch.phase("turn"):
                stack.enter_context(self.turns.taken())
            yield

    def _compute(self, batches: Iterator[Any], micro_batches: int) -> Tensor:
        with self.stopwatch.phase("data"):
            batch = self.place.take(next(batches, None))
        if batch is None:
            raise DataError(
                f"workload {self.workload.name} promised {self.batches_per_epoch} batches per epoch and rank "
                f"{self.world.rank} ran out of them: its steps_per_epoch and batches disagree."
            )
        with self.stopwatch.phase("forward"), self.place.autocast():
            loss = self.workload.loss(self.model, batch) / micro_batches
        with self.stopwatch.phase("backward"):
            self.optimizer.backward(loss)
        return loss.detach()

    def _clip_factor(self) -> float:
        """What gradients are multiplied with before they are sent."""
        if not self.recipe.norm_clip:
            return 1.0
        grads = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        return NormClip(self.recipe.norm_clip, self.world.world_size).factor(grads)

    def _note(self, loss: float, lr: float, micro_batches: int) -> None:
        self._tick()
        self.journal.note(
            step=self.at.step,
            epoch=self.at.epoch,
            loss=loss,
            lr=lr,
            wall_seconds=self.at.wall_seconds,
            seconds=self.stopwatch.take(),
        )
        self.at = replace(self.at, step=self.at.step + 1, batch=self.at.batch + micro_batches)
        done = -(-self.at.batch // self.config.accumulate)
        self.observer.step(Step(self.at.step, self.at.epoch, done, loss, lr, self.optimizer.completed))

    # -- validation ----------------------------------------------------------------------------------------------

    def _is_validation_due(self) -> bool:
        """On epochs 0, n-1, 2n-1, ... and on the last one."""
        every, epoch = self.config.validate_every, self.at.epoch
        return every > 0 and (epoch == 0 or (epoch + 1) % every == 0 or epoch + 1 == self.recipe.epochs)

    def _validate(self) -> tuple[Mapping[str, float], bool]:
        """The numbers of all ranks' shares together, and whether they are the best so far."""
        self.observer.validating(self.at.epoch)
        with self.optimizer.shared():
            numbers = validate(self.model, self.workload, self.world, self.place, self.turns)
        value = numbers.get(self.workload.metric.name)
        is_best = value is not None and self._is_better(value)
        best, stale = (value, 0) if is_best else (self.at.best, self.at.stale + 1)
        self.at = replace(self.at, best=best, stale=stale)
        if self.config.early_stop and stale >= self.config.early_stop:
            self.stopped_by = EARLY_STOP
        return numbers, is_best

    def _is_better(self, value: float) -> bool:
        if self.at.best is None:
            return True
        return value < self.at.best if self.workload.metric.lower_is_better else value > self.at.best

    # -- beginning, saving, ending -------------------------------------------------------------------------------

    def _open_directory(self) -> RunDirectory:
        if self.config.resume:
            return RunDirectory(find_checkpoint(self.config.resume).parent.parent)
        path = self.config.runs / self.world.announce(self.config.name or _run_name(self.recipe, self.workload))
        self.world.together(lambda: RunDirectory.create(path, self._described()) if self.world.is_first else None)
        return RunDirectory(path)

    def _described(self) -> dict[str, Any]:
        """The configuration with everything that was decided for the user."""
        resolved = replace(
            self.config.resolved(self.recipe), preset=self.workload.preset, workers=self.world.world_size, resume=None
        )
        return resolved.to_json() | {
            "world_size": self.world.world_size,
            "metric": self.workload.metric.name,
            "lower_is_better": self.workload.metric.lower_is_better,
            "parameters": self._parameters(),
            "steps_per_epoch": self.steps_per_epoch,
            "torch": torch.__version__,
            "computed_on": self.place.name,
        }

    def _start_event(self) -> Start:
        return Start(
            run=self.directory.path, workload=self.workload.name, preset=self.workload.preset,
            parameters=self._parameters(), algorithm=self.recipe.algorithm, density=self._density(),
            warmup_steps=self.recipe.warmup_steps, world_size=self.world.world_size, epochs=self.recipe.epochs,
            steps_per_epoch=self.steps_per_epoch, step=self.at.step, epoch=self.at.epoch,
            metric=self.workload.metric.name, notices=tuple(self.workload.notices),
            computed_on=self.place.name, precision=self.config.precision,
        )  # fmt: skip

    def _density(self) -> float | None:
        """What is wanted of sparse steps, if there will be any."""
        return self.recipe.density if has_sparse_steps(self.recipe.algorithm) else None

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _save(self, is_best: bool = False) -> None:
        self.observer.saved(self.state.save(self.checkpoints, self.at, is_best))
        self.gaps.give_back()

    def _resume(self, resume: Path) -> None:
        """Continue exactly where a checkpoint was written."""
        path = self.world.together(lambda: find_checkpoint(resume))
        self.at = self.state.restore(path, self.config.seed)
        if self.world.is_first:
            # Only now: a checkpoint that does not fit must leave the run as it was.
            write_json(self.directory.path / "config.json", {**self.directory.config, **self._described()})

    def _notice(self) -> str | None:
        steps, sparse_steps = self.recorder.counts
        if steps == 0:
            return "No step was made: there is nothing to report but the configuration."
        if self._density() is not None and sparse_steps == 0 and steps <= self.recipe.warmup_steps:
            return (
                f"All {steps} steps were inside the dense warm-up of {self.recipe.warmup_steps} steps: nothing was "
                f"sparsified. Train longer (--epochs) or lower --warmup-steps to see {self.recipe.algorithm} at work."
            )
        if self._density() is not None and sparse_steps == 0:
            return (
                f"No step was sparse, though the warm-up ended: buckets of fewer than --min-numel "
                f"({self.config.min_numel}) entries go dense, and algorithm auto goes dense where that is faster."
            )
        return None

    def _tick(self) -> None:
        now = perf_counter()
        passed, self._ticked = now - self._ticked, now
        wall, epoch = self.at.wall_seconds + passed, self.at.epoch_seconds + passed
        self.at = replace(self.at, wall_seconds=wall, epoch_seconds=epoch)


def _run_name(recipe: Recipe, workload: Workload) -> str:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{workload.name}-{workload.preset}-{recipe.algorithm}-{stamp}"
