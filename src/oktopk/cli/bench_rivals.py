"""`oktopk bench rivals`: other ways to train with local steps, at the bytes they need."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from oktopk.cli.arguments import field_types, to_flags
from oktopk.cli.console import bytes_text, console

_MODULE = "oktopk.cli"


@dataclass(frozen=True)
class BenchRivals:
    """Train a workload with SparseLoCo, SPARTA or DiLoCo as published: what to compare `local_steps` with.

    The rival "ablation" is `local_steps` in plain code with something left out: --settings keeps 0 (own weights forget
    what is owed), decay 0.95 (of what is owed), largest 1 (instead of each entry in turn), density 0.1.

    What ours does with the same bytes, `oktopk train --reduce updates` says.

    Example:
      oktopk bench rivals --rival sparta --settings share 0.05 --preset tiny --epochs 1 --lr 0.004 --workers 2
    """

    rival: str = "sparseloco"  # sparseloco, sparta, diloco, sparta_diloco or ablation
    every: int = 1  # local steps between synchronisations
    settings: dict[str, float] = field(default_factory=dict)  # of the rival, instead of the published ones
    workload: str = "gpt"  # what to train, as in oktopk train
    preset: str | None = None  # of the workload; None: its first
    data: str | None = None  # of the workload; None: what comes with it
    workers: int = 2  # processes to start on this machine
    epochs: int | None = None  # passes over the training set; None: the preset's
    lr: float | None = None  # learning rate; None: the preset's, which is for means of gradients
    lr_warmup_epochs: float | None = None  # linear rise of the rate; None: the preset's
    seed: int = 0  # of initial weights and data order
    json: Path | None = None  # file that the result is added to, as a JSON line

    def __call__(self) -> int:
        from oktopk.bench.rivals.training import require_rival
        from oktopk.training.environment import find_rank
        from oktopk.training.workers import launch_workers

        require_rival(self.rival, self.every)
        if find_rank() is None and self.workers > 1:
            flags = to_flags({f.name: getattr(self, f.name) for f in fields(self)}, field_types(type(self)))
            return launch_workers(self.workers, [_MODULE, "bench", "rivals", *flags])
        return self._work()

    def _work(self) -> int:
        from oktopk.bench.rivals.training import train_rival
        from oktopk.training.config import TrainConfig
        from oktopk.training.environment import find_rank
        from oktopk.training.workers import bind_worker
        from oktopk.training.world import joined_world
        from oktopk.transport.torch_dist import TorchTransport

        bind_worker(find_rank())
        config = TrainConfig(
            workload=self.workload, preset=self.preset, data=self.data, epochs=self.epochs, lr=self.lr, seed=self.seed,
            lr_warmup_epochs=self.lr_warmup_epochs,
        )  # fmt: skip
        with joined_world() as world:
            result = train_rival(config, self.rival, self.settings, self.every, world, TorchTransport())
            if world.is_first:
                scores = ", ".join(f"{name} {value:.4g}" for name, value in result.validation.items())
                console().print(
                    f"{self.rival}, every {self.every}: {scores}; {bytes_text(result.bytes_sent)} sent per worker, "
                    f"{result.fewer:.1f} times fewer than dense", markup=False, soft_wrap=True,
                )  # fmt: skip
                if self.json:
                    with open(self.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
        return 0
