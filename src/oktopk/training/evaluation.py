"""Scoring a model: during training, and a checkpoint without it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from oktopk.checkpoint import read_rank
from oktopk.training.checkpoint import require_model
from oktopk.training.config import TrainConfig
from oktopk.training.devices import HOST, Place, find_place
from oktopk.training.turns import Turns
from oktopk.training.workload import make_workload
from oktopk.training.world import World
from oktopk.workloads.base import Workload


def validate(
    model: nn.Module, workload: Workload, world: World, place: Place = HOST, turns: Turns | None = None
) -> dict[str, float]:
    """Evaluate on all ranks together and add up."""
    was_training = model.training
    model.eval()

    def evaluate_share() -> dict[str, float]:
        with (turns or Turns()).taken(), place.autocast():
            return workload.evaluate(model, world.rank, world.world_size)

    totals = world.together(evaluate_share)
    model.train(was_training)
    shares = world.share(totals)
    names = dict.fromkeys(name for share in shares for name in share)
    return workload.summarize({name: sum(share.get(name, 0.0) for share in shares) for name in names})


def evaluate(config: TrainConfig, checkpoint: Path, world: World) -> dict[str, float]:
    """The validation numbers of a checkpoint, its set dealt out over the ranks of `world`."""
    workload = world.local_first(lambda: make_workload(config))
    place = world.together(lambda: find_place(config.device, world.local_rank, config.precision))
    model = workload.model().to(place.device)
    saved = world.together(lambda: read_rank(checkpoint))
    made = f"{saved['about']['workload']}, preset {saved['about']['preset']}"
    world.together(lambda: require_model(saved["model"], model.state_dict(), made))
    model.load_state_dict(saved["model"])
    return validate(model, workload, world, place)
