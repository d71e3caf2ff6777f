"""`oktopk evaluate`: a checkpoint on the validation set of its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from oktopk.cli.console import console, table
from oktopk.training.checkpoint import find_checkpoint
from oktopk.training.devices import DeviceName
from oktopk.training.environment import find_rank, world_rank
from oktopk.training.evaluation import evaluate
from oktopk.training.trainer import resumed_config
from oktopk.training.workers import bind_worker, launch_workers
from oktopk.training.world import joined_world


@dataclass(frozen=True)
class Evaluate:
    """Score a checkpoint of a run on its validation set.

    Example:
        oktopk evaluate runs/demo
        oktopk evaluate runs/demo --checkpoint last --workers 2
    """

    run: tyro.conf.Positional[Path]  # run directory, or one checkpoint
    checkpoint: Literal["best", "last"] | None = None  # which one; None: the best, or the last if none was validated
    data: str | None = None  # another corpus; None: that of the run
    workload: str | None = None  # module:Class that the run trained, if it is not one of the package's
    trust: bool = False  # import the module:Class that the run names, whatever it is
    workers: int = 1  # processes to share the work
    device: DeviceName = "auto"  # cpu, or cuda: one GPU for each worker; auto: GPUs where there are any

    def __call__(self) -> int:
        if find_rank() is None and self.workers > 1:
            return launch_workers(self.workers, ["oktopk.cli", "evaluate", *self._arguments()])
        bind_worker(find_rank())
        path = self._checkpoint()
        with joined_world() as world:
            config = resumed_config(self.run, self.workload, self.trust)
            config = replace(config, resume=None, data=self.data or config.data, device=self.device)
            numbers = evaluate(config, path, world)
        if world_rank() == 0:
            console().print(str(path), markup=False, soft_wrap=True)
            console().print(table("validation", [numbers]) if numbers else "There is nothing to validate on.")
        return 0

    def _checkpoint(self) -> Path:
        if self.checkpoint is not None:
            return find_checkpoint(self.run, self.checkpoint)
        has_best = (self.run / "checkpoints" / "best.json").is_file()
        return find_checkpoint(self.run, "best" if has_best else "last")

    def _arguments(self) -> list[str]:
        given = {"--checkpoint": self.checkpoint, "--data": self.data, "--workload": self.workload}
        given |= {"--device": self.device}
        flags = [word for flag, value in given.items() if value for word in (flag, value)]
        return [str(self.run), *flags, *(["--trust"] if self.trust else [])]
