"""A workload small enough to train in a blink: a two-layer network that learns a fixed random function."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.errors import DataError
from oktopk.workloads.base import Metric, Recipe

INPUTS, HIDDEN = 16, 32


@dataclass(frozen=True)
class ToyConfig:
    """A toy."""

    preset: str = "tiny"  # tiny, or wide (another model)
    data: str = "made"  # made on the spot
    batch_size: int | None = None  # samples per rank
    batches: int = 6  # per epoch and rank
    dropout: float = 0.1  # draws from the random state that checkpoints must keep
    fail_at: int = -1  # step at which rank 1 meets bad data
    kill_at: int = -1  # step at which rank 1 is killed, once
    nan_at: int = -1  # step at which the loss of rank 0 is not a number
    empty_validation: bool = False


class ToyWorkload:
    """Linear regression with a hidden layer, BatchNorm and dropout; the metric is the error."""

    Config = ToyConfig
    name = "toy"
    metric = Metric("error", lower_is_better=True)
    notices: tuple[str, ...] = ()

    def __init__(self, config: ToyConfig, seed: int) -> None:
        self.config, self.preset, self.seed = config, config.preset, seed
        self.recipe = Recipe(lr=0.02, batch_size=config.batch_size or 8, epochs=2, density=0.1, warmup_steps=3)
        generator = torch.Generator().manual_seed(99)
        self._truth = torch.randn(INPUTS, 1, generator=generator)
        self._seen = 0

    def model(self) -> nn.Module:
        width = HIDDEN * (2 if self.preset == "wide" else 1)
        return nn.Sequential(
            nn.Linear(INPUTS, width),
            nn.BatchNorm1d(width),
            nn.Tanh(),
            nn.Dropout(self.config.dropout),
            nn.Linear(width, 1),
        )

    def steps_per_epoch(self, world_size: int) -> int:
        return self.config.batches

    def batches(self, epoch: int, rank: int, world_size: int, start: int = 0) -> Iterator[Any]:
        for number in range(start, self.config.batches):
            self._meet_fate(epoch * self.config.batches + number, rank)
            inputs = self._inputs((self.seed, epoch, number, rank))
            step = epoch * self.config.batches + number
            yield inputs, inputs @ self._truth, step == self.config.nan_at and rank == 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, is_bad = batch
        self._seen += 1
        loss = (model(inputs) - targets).square().mean()
        return loss * float("nan") if is_bad else loss

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        if self.config.empty_validation:
            return {"count": 0.0}
        inputs, device = self._inputs((7, 7, 7, rank)), next(model.parameters()).device
        with torch.no_grad():
            errors = (model(inputs.to(device)) - (inputs @ self._truth).to(device)).square()
        return {"error": float(errors.sum()), "count": float(errors.numel())}

    def summarize(self, totals: Mapping[str, float]) -> dict[str, float]:
        if not totals["count"]:
            return {}
        value = totals["error"] / totals["count"]
        return {"loss": value, "error": value}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = int(state["seen"])

    def _inputs(self, key: tuple[int, ...]) -> Tensor:
        seed = sum(part * 1009**place for place, part in enumerate(key))
        return torch.randn(self.recipe.batch_size, INPUTS, generator=torch.Generator().manual_seed(seed))

    def _meet_fate(self, step: int, rank: int) -> None:
        if step == self.config.fail_at and rank == 1:
            raise DataError("sample 17 is a stone: replace it.")
        marker = os.environ.get("TOY_KILLED")
        if step == self.config.kill_at and rank == 1 and marker and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
