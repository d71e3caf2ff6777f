"""Everything of a run that must survive it: what a checkpoint is made of, and how a run is made from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oktopk.reducer import Reducer
from oktopk.reduction.rank_states import RankStates
from oktopk.training.checkpoint import Checkpoints, Position, load_checkpoint, require_model
from oktopk.training.randomness import random_state, restore_random_state, seed_rank
from oktopk.training.synchronisation import Synchronisation
from oktopk.training.world import World
from oktopk.workloads.base import Workload

SYNCHRONISATION = "synchronisation"  # what `oktopk.save` writes of a reducer, or of local steps


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
        return checkpoints.save(self, at, self._about(), is_best)

    def restore(self, path: Path, seed: int) -> Position:
        """Take everything from a checkpoint; how far the run had come."""
        at, about = load_checkpoint(self, path)
        if about["world_size"] == self.world.world_size:
            return at
        # The same share of the epoch is done, and ranks draw numbers that none has drawn before.
        seed_rank(seed, self.world.rank, at.step)
        return replace(at, batch=at.batch * self.batches_per_epoch // max(1, about["batches_per_epoch"]))

    def _about(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "preset": self.workload.preset,
            "algorithm": self.reducer.algorithm,
            "world_size": self.world.world_size,
            "batches_per_epoch": self.batches_per_epoch,
        }

    # -- what `oktopk.save` and `load` ask for -------------------------------------------------------------------

    @property
    def reducer(self) -> Reducer:
        return self.optimizer.reducer

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's state, good until the next step."""
        return self._common_state() | self._own_state()

    def rank_state(self) -> dict[str, Any]:
        """What the file of this rank holds: what all ranks share is in that of rank 0."""
        return (self._common_state() if self.world.is_first else {}) | self._own_state()

    def _common_state(self) -> dict[str, Any]:
        return {"model": self._shared_model(), "optimizer": self.optimizer.shared_state()}

    def _own_state(self) -> dict[str, Any]:
        # Running statistics of normalisation layers differ between ranks inside an epoch.
        return {
            "about": self._about(),
            "workload": self.workload.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "random": random_state(),
            "scaler": self.optimizer.scaler.state_dict() if self.optimizer.scaler is not None else {},
            SYNCHRONISATION: self.optimizer.saveable.rank_state(),
        }

    def from_rank_states(self, states: RankStates) -> Mapping[str, Any]:
        """This rank's state. What belongs to a place in the data is not for ranks of a world of another size."""
        synchronisation = self.optimizer.saveable.from_rank_states(states.part(SYNCHRONISATION))
        own = {} if states.is_same_world else {"workload": None, "random": None}
        return {**states.first, **states.nearest, **own, SYNCHRONISATION: synchronisation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        about = state["about"]
        require_model(state["model"], self.model.state_dict(), f"{about['workload']}, preset {about['preset']}")
        self.model.load_state_dict(dict(state["model"]))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.optimizer.load_shared_state(state["optimizer"])
        self.optimizer.saveable.load_state_dict(state[SYNCHRONISATION])
        self._restore_scale(state.get("scaler", {}))
        if state["random"] is not None:
            self.workload.load_state_dict(state["workload"])
            restore_random_state(state["random"])

    def _restore_scale(self, saved: Mapping[str, Any]) -> None:
        """Of the loss; a run may go on in another precision, and then what is owed comes in another unit."""
        if self.optimizer.scaler is None:
            self.reducer.set_gradient_scale(1.0)
        elif saved:
            self.optimizer.scaler.load_state_dict(dict(saved))

    def _shared_model(self) -> dict[str, Any]:
        """The weights that all ranks have in common: a copy where the model has them for this moment only."""
        with self.optimizer.shared():
            state = self.model.state_dict()
            return {name: value.clone() for name, value in state.items()} if self.optimizer.lends else state
