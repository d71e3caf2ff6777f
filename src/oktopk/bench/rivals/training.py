"""Training a workload with a rival: local steps on every rank, and the rival's synchronisation after some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from oktopk.bench.rivals import RIVALS, Rival
from oktopk.bench.training_step import clip_of, take_step
from oktopk.errors import ConfigError, nearest
from oktopk.training.config import TrainConfig
from oktopk.training.evaluation import validate
from oktopk.training.learning_rate import learning_rate
from oktopk.training.optimizers import make_optimizer
from oktopk.training.randomness import seed_all, seed_rank
from oktopk.training.workload import make_workload
from oktopk.training.world import World
from oktopk.transport.base import Transport, all_reduce_bytes
from oktopk.transport.metered import MeteredTransport
from oktopk.workloads.base import Recipe, Workload


@dataclass(frozen=True)
class RivalResult:
    """What one training with a rival came to."""

    rival: str
    settings: Mapping[str, float]
    every: int
    lr: float
    seed: int
    world_size: int
    steps: int
    metric: str
    validation: Mapping[str, float]
    bytes_sent: int  # by rank 0 in the whole training, what finishes it included
    dense_bytes: int  # what an all-reduce of float32 gradients in every step sends

    @property
    def fewer(self) -> float:
        return self.dense_bytes / max(1, self.bytes_sent)


def train_rival(
    config: TrainConfig, name: str, settings: Mapping[str, float], every: int, world: World, transport: Transport
) -> RivalResult:
    """Train as `config` says, as the trainer would, but kept together by a rival every so many steps."""
    require_rival(name, every)
    seed_all(config.seed)
    workload = world.local_first(lambda: make_workload(config))
    recipe = config.recipe(workload.recipe, world.world_size)
    model = workload.model()
    metered = MeteredTransport(transport)
    shapes = [parameter.shape for parameter in model.parameters()]
    rival = RIVALS[name](_weights(model), shapes, metered, **settings)
    seed_rank(config.seed, world.rank)
    steps = _train(model, workload, recipe, rival, every, world)
    dense = all_reduce_bytes(4 * _weights(model).numel(), world.world_size) * steps
    return RivalResult(
        name, dict(settings), every, recipe.lr, config.seed, world.world_size, steps, workload.metric.name,
        validate(model, workload, world), metered.tally.bytes_sent, dense,
    )  # fmt: skip


def require_rival(name: str, every: int) -> None:
    if name not in RIVALS:
        raise ConfigError(f"unknown rival {name!r}. {nearest(name, RIVALS)}")
    if every < 1:
        raise ConfigError(f"every must be 1 or more steps, got {every}.")


def _train(model: nn.Module, workload: Workload, recipe: Recipe, rival: Rival, every: int, world: World) -> int:
    """All epochs; how many steps they had."""
    optimizer, clip = make_optimizer(recipe, model.parameters()), clip_of(recipe, model)
    per_epoch, step = workload.steps_per_epoch(world.world_size), 0
    model.train()
    for epoch in range(recipe.epochs):
        for batch in workload.batches(epoch, world.rank, world.world_size):
            rate = learning_rate(recipe, step, per_epoch, world.world_size)
            take_step(workload, model, optimizer, batch, rate, clip)
            step += 1
            if step % every == 0:
                _apply(rival.synchronize_, model)
    _apply(rival.finish_, model)
    return step


def _weights(model: nn.Module) -> Any:
    return parameters_to_vector(model.parameters()).detach().clone()


def _apply(change_: Any, model: nn.Module) -> None:
    own = _weights(model)
    change_(own)
    vector_to_parameters(own, model.parameters())
