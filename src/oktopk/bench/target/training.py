"""The work of one rank in a whole training of a contender, over real batches, with its quality on the way.

Quality is that of the weights with which a training would end there: the mean of all ranks' weights, or those that an
exchange has just left. To find it is not part of the time of a training, nor of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.bench.rank import RankContext
from oktopk.bench.target.contenders import CONTENDERS, Participant, Setting
from oktopk.bench.target.schedule import FINAL, Schedule
from oktopk.bench.training_step import take_step
from oktopk.errors import NonFiniteError
from oktopk.training.config import TrainConfig
from oktopk.training.evaluation import validate
from oktopk.training.learning_rate import learning_rate
from oktopk.training.randomness import seed_all, seed_rank
from oktopk.training.run_directory import STEPS, RunDirectory
from oktopk.training.workload import make_workload, preset_recipe
from oktopk.training.world import World
from oktopk.transport.torch_dist import TorchTransport
from oktopk.workloads.base import Recipe, Workload

EVALUATIONS = "evaluations.jsonl"
_ONLY_OURS = ("density", "warmup_steps", "reduce", "algorithm", "wire", "keep_owed", "mean_over")  # of a recipe
BRIEF_CYCLE = 12  # steps from exchange to exchange while they are timed: few exchanges, many of those between
NEWS_SECONDS = 0.5  # between two words on how far it is


@dataclass(frozen=True)
class Job:
    """One training."""

    workload: str
    contender: str
    hosts: int
    seed: int = 0
    preset: str | None = None
    data: str | None = None
    epochs: int | None = None
    lr: float | None = None  # for means of gradients; local optimizers get what the trainer makes of it
    lr_warmup_epochs: float | None = None
    evaluations: int = 20  # at about as many places, the end included

    @property
    def config(self) -> TrainConfig:
        contender = CONTENDERS[self.contender]
        return TrainConfig(
            self.workload, self.preset, self.data, epochs=self.epochs, lr_warmup_epochs=self.lr_warmup_epochs,
            seed=self.seed, reduce=contender.reduce, every=contender.every, overlap=contender.overlap,
        )  # fmt: skip

    def recipe(self, base: Recipe) -> Recipe:
        """The preset's, with what was said. The rate is dense's: from it the rate of updates follows."""
        return self.config.recipe(base if self.lr is None else replace(base, lr=self.lr), self.hosts)

    @property
    def method(self) -> str:
        """Contender and recipe in words: what is kept of a training counts while it would be trained alike today."""
        contender = CONTENDERS[self.contender]
        recipe = asdict(self.recipe(preset_recipe(self.workload, self.preset)))
        unused = () if contender.is_ours else _ONLY_OURS
        return ", ".join([contender.how, *(f"{name} {value}" for name, value in recipe.items() if name not in unused)])

    @property
    def asked(self) -> dict[str, Any]:
        """What a finished piece must have been made with."""
        return asdict(self) | {"method": self.method}


def said_words(asked: Mapping[str, Any]) -> list[str]:
    """What of a job was said instead of left to the preset, for names: trainings of another recipe are others."""
    data = [Path(asked["data"]).stem] if asked["data"] else []
    recipe = [name for name in ("epochs", "lr", "lr_warmup_epochs") if asked[name] is not None]
    return data + [f"{name.replace('_', '-')}-{asked[name]:g}" for name in recipe]


@dataclass(frozen=True)
class Seen:
    """One step, as rank 0 saw it."""

    step: int
    kind: str
    loss: float
    lr: float
    seconds: float
    bytes_sent: int  # by the kernel's counter of its host's interface; 0 where ranks share one


class Training:
    """One rank of a training, step by step."""

    def __init__(self, job: Job, context: RankContext, is_counted: bool, brief: int | None = None) -> None:
        """With `brief`, kinds of steps follow each other soon, after that many dense ones."""
        self._sent = (lambda: context.wire_bytes()[0]) if is_counted else (lambda: 0)
        self._transport = TorchTransport()
        self.world = World(self._transport, local_rank=context.rank)  # all hosts are this one
        seed_all(job.seed)
        self.workload: Workload = self.world.local_first(lambda: make_workload(job.config))
        contender = CONTENDERS[job.contender]
        self.recipe: Recipe = job.recipe(self.workload.recipe)
        self.per_epoch = self.workload.steps_per_epoch(context.world_size)
        self.steps = self.per_epoch * self.recipe.epochs
        schedule = contender.schedule(self.recipe, self.steps)
        self.schedule = schedule if brief is None else schedule.brief(brief, BRIEF_CYCLE)
        self.model = self.workload.model()
        self._copy: nn.Module | None = None  # to look at quality with
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        setting = Setting(self._config(job), self.recipe, self.model, self._transport, self.schedule)
        self.participant: Participant = contender.attach(setting)
        seed_rank(job.seed, context.rank)
        self.done, self._counted = 0, self._sent()
        # Steps are timed with batches of the second epoch: in the first, speech comes by length, the shortest first.
        self._batches = self._endless(first=0 if brief is None else 1)
        self.model.train()

    def _config(self, job: Job) -> TrainConfig:
        return replace(job.config, every=self.schedule.every) if job.config.reduce == "updates" else job.config

    def _endless(self, first: int) -> Iterator[Any]:
        for epoch in count(first):
            yield from self.workload.batches(epoch, self.world.rank, self.world.world_size)

    def resume(self) -> None:
        """Go on together with the other ranks; what others sent since the last step is not counted."""
        self.world.total([0.0])
        self._counted = self._sent()

    def step(self) -> Seen:
        """The next one. What was still under way when the last one ended is counted here."""
        started, before = perf_counter(), self._counted
        taken, rate = self.participant, learning_rate(self.recipe, self.done, self.per_epoch, self.world.world_size)
        loss = take_step(self.workload, taken.model, taken.optimizer, next(self._batches), rate, taken.clip)
        taken.exchange(self.done)
        seen = float(loss)
        seconds, self._counted = perf_counter() - started, self._sent()
        self.done += 1
        return Seen(self.done - 1, self.schedule.kind(self.done - 1), seen, rate, seconds, self._counted - before)

    def finish(self) -> Seen | None:
        """What ends it, for contenders whose ranks have weights of their own."""
        if self.participant.finish is None:
            return None
        self.resume()
        started, before = perf_counter(), self._counted
        self.participant.finish()
        seconds, sent = perf_counter() - started, self._sent() - before
        return Seen(self.done, FINAL, 0.0, 0.0, seconds, sent)

    def quality(self) -> dict[str, float]:
        """Of what training would end with here, in a copy: `local_steps` would notice that weights changed."""
        is_level = self.done > 0 and self.schedule.is_level(self.done)
        with self.participant.shared() if is_level else nullcontext():
            self._copy = deepcopy(self.model) if self._copy is None else self._copy
            copies = _tensors(self._copy)
            for copy, own in zip(copies, _tensors(self.model), strict=True):
                copy.copy_(own)
        is_apart = self.participant.finish is not None and not is_level
        differing = copies if is_apart else copies[len(list(self.model.parameters())) :]
        self.world.average_([copy for copy in differing if copy.is_floating_point()])
        numbers = validate(self._copy, self.workload, self.world)
        self._counted = self._sent()
        return numbers

    def close(self) -> None:
        self.participant.close()
        self.world.close()


def _tensors(model: nn.Module) -> list[Tensor]:
    """Weights, and what normalisation layers remember."""
    return [*(parameter.data for parameter in model.parameters()), *model.buffers()]


def train(context: RankContext, job: Mapping[str, Any], directory: str, network: str) -> None:
    """Train to the end; rank 0 writes the run directory and says how far it is. The network is "" on loopback."""
    asked = Job(**job)
    training = Training(asked, context, is_counted=bool(network))
    run = _Run(training, asked, Path(directory), network, context)
    run.evaluate()
    places = evaluation_steps(training.steps, asked.evaluations, training.schedule)
    try:
        while training.done < training.steps and not run.diverged:
            run.note(training.step())
            if training.done in places:
                run.evaluate()
    except NonFiniteError:  # every rank has it
        run.diverged = True
    run.end(None if run.diverged else training.finish())
    training.close()


def evaluation_steps(steps: int, evaluations: int, schedule: Schedule) -> set[int]:
    """After which steps quality is looked at: about evenly, where a training could end for nothing, and at the end."""
    reach = min(schedule.cycle, steps // (2 * evaluations))

    def near(step: int) -> int:
        around = range(max(1, step - reach), min(steps, step + reach) + 1)
        return min(filter(schedule.is_level, around), key=lambda other: abs(other - step), default=step)

    even = [max(1, round(steps * n / evaluations)) for n in range(1, evaluations + 1)]
    return {*map(near, even[:-1]), steps}


class _Run:
    """What rank 0 writes down."""

    def __init__(self, training: Training, job: Job, path: Path, network: str, context: RankContext) -> None:
        self._training, self._context, self._metric = training, context, training.workload.metric
        self._seen: list[Seen] = []
        self._seconds, self._bytes, self.diverged = 0.0, 0, False
        self._validation: dict[str, float] = {}
        self._said = 0.0
        self._directory = RunDirectory(path)
        if context.rank == 0:
            described = {
                "asked": job.asked, "network": network, "metric": self._metric.name,
                "lower_is_better": self._metric.lower_is_better, "preset": training.workload.preset,
                "parameters": training.parameters, "steps": training.steps, "lr": training.recipe.lr,
                "schedule": asdict(training.schedule), "torch": torch.__version__,
            }  # fmt: skip
            RunDirectory.create(path, described)

    def note(self, seen: Seen) -> None:
        self._seen.append(seen)
        self._seconds += seen.seconds
        self._bytes += seen.bytes_sent
        if self._context.rank == 0 and monotonic() - self._said > NEWS_SECONDS:
            self._said = monotonic()
            self._context.emit(done=self._training.done, of=self._training.steps)

    def evaluate(self) -> None:
        """Look at quality; one that is no number ends the training, on all ranks alike."""
        self._validation = self._training.quality()
        value = self._validation.get(self._metric.name, math.nan)
        self.diverged = not math.isfinite(value)
        if self._context.rank == 0:
            self._directory.append(STEPS, map(asdict, self._seen))
            row = {"step": self._training.done, "seconds": self._seconds, "bytes_sent": self._bytes}
            self._directory.append(EVALUATIONS, [row | {"validation": self._validation}])
        self._seen = []

    def end(self, final: Seen | None) -> None:
        if self._context.rank == 0:
            self._directory.append(STEPS, map(asdict, [*self._seen, *([final] if final else [])]))
            summary = {
                "steps": self._training.done, "metric": self._metric.name, "validation": self._validation,
                "diverged": self.diverged, "seconds": self._seconds + (final.seconds if final else 0.0),
                "bytes_sent": self._bytes + (final.bytes_sent if final else 0),
            }  # fmt: skip
            self._directory.write_summary(summary)
