"""Everything of a run that must survive it: what a checkpoint is made of, and how a run is made from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oktopk.checkpoint import load
from oktopk.training.checkpoint import Checkpoints, Position, require_model
from oktopk.training.randomness import random_state, restore_random_state, seed_rank
from oktopk.training.synchronisation import Synchronisation
from oktopk.training.world import World
from oktopk.workloads.base import Workload


@dataclass(frozen=True)
class State:
    """The parts of a run on one rank. All ranks save and restore together."""

    model: nn.Module
    optimizer: Synchronisation
    workload: Workload
    world: World
    batches_per_epoch: int

    def save(self, checkpoints: Checkpoints, at: Position, is_best: bool) -> Path:
        """Write a checkpoint; where it is."""
        meta = {
            "workload": self.workload.name,
            "preset": self.workload.preset,
            "algorithm": self.optimizer.reducer.algorithm,
            "batches_per_epoch": self.batches_per_epoch,
        }
        shared = {"model": self._shared_model(), "optimizer": self.optimizer.shared_state()}
        # Running statistics of normalisation layers differ between ranks inside an epoch.
        mine = {
            "workload": self.workload.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "random": random_state(),
        }
        return checkpoints.save(at, meta, shared, mine, self.optimizer.saveable, is_best)

    def _shared_model(self) -> dict[str, Any]:
        """A copy of the weights that all ranks have in common."""
        with self.optimizer.shared():
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self, checkpoints: Checkpoints, path: Path, seed: int) -> Position:
        """Take everything from a checkpoint; how far the run had come."""
        saved = self.world.together(lambda: checkpoints.load(path))
        self.world.together(lambda: require_model(saved.meta, saved.shared["model"], path, self.model.state_dict()))
        self.model.load_state_dict(dict(saved.shared["model"]))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved.mine["buffers"][name])
        self.optimizer.load_shared_state(saved.shared["optimizer"])
        load(self.optimizer.saveable, path / "reducer")
        if saved.meta["world_size"] != self.world.world_size:
            return self._in_another_world(saved.position, saved.meta, seed)
        self.workload.load_state_dict(saved.mine["workload"])
        restore_random_state(saved.mine["random"])
        return saved.position

    def _in_another_world(self, at: Position, meta: Mapping[str, Any], seed: int) -> Position:
        """The same share of the epoch is done, and ranks draw numbers that none has drawn before."""
        seed_rank(seed, self.world.rank, at.step)
        return replace(at, batch=at.batch * self.batches_per_epoch // max(1, meta["batches_per_epoch"]))
