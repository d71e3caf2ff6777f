"""Scoring a checkpoint without training."""

from __future__ import annotations

from pathlib import Path

from oktopk.training.checkpoint import load_file, read_meta, require_model
from oktopk.training.config import TrainConfig
from oktopk.training.trainer import validate
from oktopk.training.workload import make_workload
from oktopk.training.world import World


def evaluate(config: TrainConfig, checkpoint: Path, world: World) -> dict[str, float]:
    """The validation numbers of a checkpoint, its set dealt out over the ranks of `world`."""
    workload = world.local_first(lambda: make_workload(config))
    model = workload.model()
    meta = world.together(lambda: read_meta(checkpoint))
    state = world.together(lambda: load_file(checkpoint / "shared.pt"))["model"]
    world.together(lambda: require_model(meta, state, checkpoint, model.state_dict()))
    model.load_state_dict(state)
    return validate(model, workload, world)
