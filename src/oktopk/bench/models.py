"""What the step benchmark trains: a stand-in with a given number of parameters, or a workload by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from oktopk.errors import ConfigError
from oktopk.training.devices import HOST, Place
from oktopk.workloads import workload_classes

WIDTH = 1024
BATCH = 2  # few samples: gradients as large as the model, little arithmetic, so the network is what is measured

Loss = Callable[[nn.Module], Tensor]  # of a model on the next batch


def synthetic(numel: int, rank: int, batch: int = BATCH, place: Place = HOST) -> tuple[nn.Module, Loss]:
    """A multilayer perceptron of exactly `numel` parameters, fed with other noise on every rank and step."""
    model = Synthetic(numel)
    noise = torch.Generator().manual_seed(1000 + rank)

    def loss(module: nn.Module) -> Tensor:
        outputs: Tensor = module(place.take(torch.randn(batch, model.width, generator=noise)))
        return outputs.square().mean()

    return model.to(place.device), loss


def workload(name: str, rank: int, world_size: int, place: Place = HOST) -> tuple[nn.Module, Loss]:
    """The model and batches of a workload: "speech:lstman4", or "vision" for its default preset."""
    kind, _, preset = name.partition(":")
    config_class, workload_class = workload_classes(kind)
    task = workload_class(config_class(preset=preset) if preset else config_class(), 0)
    batches = _endless(task, rank, world_size)
    return task.model().to(place.device), lambda module: task.loss(module, place.take(next(batches)))


class Synthetic(nn.Module):
    """Square layers with biases, one narrower layer, and a vector that takes what is left."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        if numel < 16:
            raise ConfigError(f"numel must be 16 or more, got {numel}: it is the number of parameters of the model.")
        self.width = width = min(WIDTH, max(1, int(numel**0.5) // 2))
        layers, rest = divmod(numel, width * width + width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.narrow = nn.Linear(width, rest // width, bias=False) if rest >= width else None
        self.rest = nn.Parameter(torch.zeros(rest % width)) if rest % width else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x)) + x
        if self.rest is not None:
            x = x + functional.pad(self.rest, (0, self.width - self.rest.numel()))
        return x if self.narrow is None else torch.cat([x, self.narrow(x)], dim=1)


def _endless(task: Any, rank: int, world_size: int) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from task.batches(epoch, rank, world_size)
        epoch += 1
